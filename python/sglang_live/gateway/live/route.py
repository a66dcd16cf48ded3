"""The /v1/live/sessions route: checks of a handshake, and the protocol on its socket."""

import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import ANONYMOUS, choose_subprotocol
from sglang_live.gateway.call.link import CallLink
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.wire import CLOSE_TRY_AGAIN_LATER, SocketWire, Wire
from sglang_live.gateway.errors import (
    CLOSE_POLICY_VIOLATION,
    CallsOnlyError,
    InvalidKeyError,
    NoLanguageModelError,
    ParameterError,
    refuse_handshake,
)
from sglang_live.gateway.json_forms import unknown_parameter
from sglang_live.gateway.live.events import event_id_of
from sglang_live.gateway.live.session import LiveSession
from sglang_live.gateway.live.sidebands import LiveSessions, Sideband
from sglang_live.gateway.live.stream import error_fields
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.rate_limits import RateLimitError
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import VoiceSession


class LiveProtocol:
    """
    owner: owner of the client's key.
    sessions: those that sidebands find.
    """

    def __init__(self, parts: GatewayParts, owner: str, sessions: LiveSessions):
        self._parts = parts
        self._owner = owner
        self._sessions = sessions

    def open(self, session: VoiceSession, outbox: Outbox) -> LiveSession:
        return LiveSession(session, outbox, self._parts, self._owner, self._sessions)

    def refuse(self, outbox: Outbox, error: LiveError, frame: str | None) -> None:
        event_id = None if frame is None else event_id_of(frame)
        outbox.emit("error", **error_fields(error, event_id))


def live_link(
    wire: Wire, parts: GatewayParts, sessions: LiveSessions, owner: str = ANONYMOUS
) -> CallLink:
    return CallLink(wire, parts, LiveProtocol(parts, owner, sessions), kind="live")


class LiveRoute:
    def __init__(self, parts: GatewayParts):
        self._parts = parts
        self._sessions = LiveSessions()

    async def __call__(self, socket: WebSocket) -> None:
        parts, offered = self._parts, socket.scope.get("subprotocols", [])
        if not parts.keys.allow(socket.headers, offered):
            parts.metrics.sessions_refused.labels(InvalidKeyError.code).inc()
            await refuse_handshake(socket, InvalidKeyError())
            return
        owner = parts.keys.owner(socket.headers, offered)
        await socket.accept(choose_subprotocol(offered))
        try:
            try:
                self._check(socket, owner)
                counted = await parts.open_sessions.open(owner)
            except LiveError as error:
                parts.metrics.sessions_refused.labels(error.code).inc()
                await _refuse(socket, error)
                return
            with counted:
                await live_link(SocketWire(socket), parts, self._sessions, owner).run()
        except WebSocketDisconnect:
            pass  # the client left before the refusal was sent

    async def attach(self, socket: WebSocket) -> None:
        """A sideband of the session that the path names."""
        parts, offered = self._parts, socket.scope.get("subprotocols", [])
        try:
            if not parts.keys.allow(socket.headers, offered):
                raise InvalidKeyError
            _check_attach(socket)
            owner = parts.keys.owner(socket.headers, offered)
            session = self._sessions.find(socket.path_params["session_id"], owner)
        except LiveError as error:
            parts.metrics.sessions_refused.labels(error.code).inc()
            await refuse_handshake(socket, error)
            return
        await socket.accept(choose_subprotocol(offered))
        await Sideband(SocketWire(socket), parts, session).run()

    def _check(self, socket: WebSocket, owner: str) -> None:
        if not self._parts.config.model.has_language_model:
            raise CallsOnlyError if self._parts.orchestrator.duplex_s else NoLanguageModelError
        self._parts.tiers.check_heard(owner)
        for name in socket.query_params:
            raise unknown_parameter(name)


def _check_attach(socket: WebSocket) -> None:
    """Every close is a graceful one."""
    for name, value in socket.query_params.items():
        if name != "graceful_close":
            raise unknown_parameter(name)
        if value not in ("true", "false"):
            raise ParameterError(name, "is true or false.")


async def _refuse(socket: WebSocket, error: LiveError) -> None:
    event = {"type": "error", "event_id": new_id("event"), **error_fields(error, None)}
    await socket.send_text(orjson.dumps(event).decode())
    later = isinstance(error, RateLimitError)
    await socket.close(CLOSE_TRY_AGAIN_LATER if later else CLOSE_POLICY_VIOLATION, error.code)
