"""/v1/live/sessions: the protocol on a socket, or over WebRTC; sidebands, and the hang-up."""

from contextlib import ExitStack

import msgspec
import orjson
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import ANONYMOUS, choose_subprotocol
from sglang_live.gateway.call.link import CallLink
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.wire import CLOSE_TRY_AGAIN_LATER, SocketWire, Wire
from sglang_live.gateway.errors import (
    CLOSE_POLICY_VIOLATION,
    LIVE_PATH,
    CallsOnlyError,
    InvalidKeyError,
    NoLanguageModelError,
    ParameterError,
    UpgradeError,
    refuse_handshake,
)
from sglang_live.gateway.http.body import read_body, read_json
from sglang_live.gateway.json_forms import unknown_parameter
from sglang_live.gateway.live.events import CallForm, SessionStart, event_id_of
from sglang_live.gateway.live.session import LiveSession
from sglang_live.gateway.live.session_config import start_config
from sglang_live.gateway.live.sidebands import LiveSessions, SessionNotFoundError, Sideband
from sglang_live.gateway.live.stream import error_fields
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.rate_limits import RateLimitError
from sglang_live.gateway.webrtc.calls import OpenCalls
from sglang_live.gateway.webrtc.processes import MediaCall, UnusableOfferError
from sglang_live.gateway.webrtc.sound import Track
from sglang_live.gateway.webrtc.wire import CallWire
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import VoiceSession

_MAX_BODY_BYTES = 1 << 20


class LiveProtocol:
    """
    owner: owner of the client's key.
    sessions: those that sidebands find.
    track: of a call; None: audio is events.
    """

    def __init__(
        self,
        parts: GatewayParts,
        owner: str,
        sessions: LiveSessions,
        track: Track | None = None,
    ):
        self._parts = parts
        self._owner = owner
        self._sessions = sessions
        self._track = track

    def open(self, session: VoiceSession, outbox: Outbox) -> LiveSession:
        return LiveSession(session, outbox, self._parts, self._owner, self._sessions, self._track)

    def refuse(self, outbox: Outbox, error: LiveError, frame: str | None) -> None:
        event_id = None if frame is None else event_id_of(frame)
        outbox.emit("error", **error_fields(error, event_id))


def live_link(
    wire: Wire,
    parts: GatewayParts,
    sessions: LiveSessions,
    owner: str = ANONYMOUS,
    track: Track | None = None,
) -> CallLink:
    return CallLink(wire, parts, LiveProtocol(parts, owner, sessions, track), kind="live")


class LiveRoute:
    def __init__(self, parts: GatewayParts, calls: OpenCalls):
        self._parts = parts
        self._calls = calls
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
            session.broadcast.check_room()
        except LiveError as error:
            parts.metrics.sessions_refused.labels(error.code).inc()
            await refuse_handshake(socket, error)
            return
        await socket.accept(choose_subprotocol(offered))
        await Sideband(SocketWire(socket), parts, session).run()

    async def begin(self, request: Request) -> Response:
        """A session over WebRTC. It starts when the client's channel is open."""
        if request.method != "POST":
            raise UpgradeError(LIVE_PATH)
        parts, owner = self._parts, self._parts.keys.owner(request.headers)
        if parts.orchestrator.duplex_s:
            raise CallsOnlyError
        self._check(request, owner)
        self._calls.check(owner)
        with await parts.open_sessions.open(owner) as counted:
            return await self._begin(request, owner, counted)

    async def _begin(self, request: Request, owner: str, counted: ExitStack) -> Response:
        """counted: see OpenCalls.begin."""
        parts = self._parts
        form = read_json(await read_body(request, _MAX_BODY_BYTES), CallForm)
        start_config(form.session, parts, owner, on_track=True)
        opening = msgspec.json.encode(SessionStart(session=form.session)).decode()

        def link_of(call: MediaCall, wire: CallWire) -> CallLink:
            return live_link(wire, parts, self._sessions, owner, Track(call))

        try:
            begun = await self._calls.begin(
                form.transport.sdp, request.client, owner, counted, link_of, opening
            )
        except UnusableOfferError as error:
            error.param = "transport.sdp"
            raise
        transport = {"type": "webrtc", "sdp": begun.answer}
        return JSONResponse({"session": {"id": begun.session_id}, "transport": transport}, 201)

    async def hang_up(self, request: Request) -> Response:
        name, owner = request.path_params["session_id"], self._parts.keys.owner(request.headers)
        try:
            session = self._sessions.find(name, owner)
        except SessionNotFoundError:
            if (waiting := self._calls.of_session(name, owner)) is None:
                raise
            await waiting.hang_up()  # its channel is not open yet
        else:
            session.hang_up()
            await session.until_gone()
        return Response(status_code=200)

    def _check(self, connection: HTTPConnection, owner: str) -> None:
        parts = self._parts
        if not (parts.config.model.has_language_model or parts.orchestrator.duplex_s):
            raise NoLanguageModelError
        parts.tiers.check_heard(owner)
        for name in connection.query_params:
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
