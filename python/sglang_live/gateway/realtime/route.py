"""The /v1/realtime route: checks of a handshake, and the protocol on its socket."""

from typing import Any

import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import ANONYMOUS, choose_subprotocol, offered_keys
from sglang_live.gateway.call.link import CallLink
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.wire import CLOSE_TRY_AGAIN_LATER, SocketWire, Wire
from sglang_live.gateway.errors import (
    CLOSE_POLICY_VIOLATION,
    ClientEventError,
    InvalidKeyError,
    NoLanguageModelError,
    cut,
    error_body,
    refuse_handshake,
)
from sglang_live.gateway.model import check_model
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.rate_limits import RateLimitError
from sglang_live.gateway.realtime.client_secrets import ClientSecrets
from sglang_live.gateway.realtime.events import SessionForm, event_id_of
from sglang_live.gateway.realtime.session import RealtimeSession
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import VoiceSession

_QUERY = ("model", "intent", "call_id")
_BETA_HEADER, _BETA_SUBPROTOCOL = "realtime=v1", "openai-beta.realtime-v1"


class RealtimeProtocol:
    """
    preset: settings of the session from its client secret; None: the defaults.
    owner: owner of the client's key.
    """

    def __init__(
        self, parts: GatewayParts, preset: SessionForm | None = None, owner: str = ANONYMOUS
    ):
        self._parts = parts
        self._preset = preset
        self._owner = owner

    def open(self, session: VoiceSession, outbox: Outbox) -> RealtimeSession:
        opened = RealtimeSession(session, outbox, self._parts, self._preset, self._owner)
        opened.greet()
        return opened

    def refuse(self, outbox: Outbox, error: LiveError, frame: str | None) -> None:
        event_id = None if frame is None else event_id_of(frame)
        outbox.emit("error", error={**error_body(error), "event_id": event_id})


def realtime_link(
    wire: Wire, parts: GatewayParts, preset: SessionForm | None = None, owner: str = ANONYMOUS
) -> CallLink:
    return CallLink(wire, parts, RealtimeProtocol(parts, preset, owner), kind="sess")


class RealtimeRoute:
    def __init__(self, parts: GatewayParts, secrets: ClientSecrets):
        self._parts = parts
        self._keys = parts.keys
        self._secrets = secrets

    async def __call__(self, socket: WebSocket) -> None:
        offered = socket.scope.get("subprotocols", [])
        secret = self._secrets.find(offered_keys(socket.headers, offered))
        if secret is None and not self._keys.allow(socket.headers, offered):
            await self._deny(socket)
            return
        owner = secret.owner if secret else self._keys.owner(socket.headers, offered)
        await socket.accept(choose_subprotocol(offered))
        holders = [owner, secret.value] if secret else [owner]
        refusal = self._refusal(socket, holders)
        try:
            if refusal:
                self._parts.metrics.sessions_refused.labels(refusal["code"]).inc()
                await _refuse(socket, refusal)
                return
            preset = secret.session if secret else None
            with self._parts.open_sessions.one(*holders):
                await realtime_link(SocketWire(socket), self._parts, preset, owner).run()
        except WebSocketDisconnect:
            pass  # the client left before the refusal was sent

    def _refusal(self, socket: WebSocket, holders: list[str]) -> dict[str, Any] | None:
        """holders: the key's owner, then the client secret if there is one."""
        try:
            if not self._parts.config.model.has_language_model:
                raise NoLanguageModelError
            self._parts.tiers.check_heard(holders[0])
            self._parts.open_sessions.check_room(*holders)
            _check_shape(socket)
            check_model(self._parts.orchestrator.model_name, socket.query_params.get("model"))
        except LiveError as error:
            return error_body(error)
        return None

    async def _deny(self, socket: WebSocket) -> None:
        self._parts.metrics.sessions_refused.labels(InvalidKeyError.code).inc()
        # OpenAI refuses the handshake with 401; clients then stop trying.
        await refuse_handshake(socket, InvalidKeyError())


def _check_shape(socket: WebSocket) -> None:
    """Raises ClientEventError if the handshake requests the beta or something unsupported."""
    offered = socket.scope.get("subprotocols", [])
    if _BETA_HEADER in socket.headers.get("openai-beta", "") or _BETA_SUBPROTOCOL in offered:
        raise ClientEventError(
            "The beta's events are not supported, only those of the general release: leave out "
            "the header OpenAI-Beta.",
            code="beta_api_shape_disabled",
            param="OpenAI-Beta",
        )
    for name in socket.query_params:
        if name not in _QUERY:
            raise ClientEventError(
                f"Unknown parameter in the URL: {cut(name)!r}. Use session.update for settings.",
                code="unknown_parameter",
                param=name,
            )
    if "call_id" in socket.query_params:
        raise ClientEventError("WebRTC and SIP calls are not supported.", param="call_id")
    if (intent := socket.query_params.get("intent")) is not None:
        raise ClientEventError(
            f"Sessions for {cut(intent)!r} are not supported, only conversations.",
            code="unsupported_session_type",
            param="intent",
        )


async def _refuse(socket: WebSocket, error: dict[str, Any]) -> None:
    event = {"type": "error", "event_id": new_id("event"), "error": {**error, "event_id": None}}
    await socket.send_text(orjson.dumps(event).decode())
    later = error["code"] == RateLimitError.code
    code = CLOSE_TRY_AGAIN_LATER if later else CLOSE_POLICY_VIOLATION
    await socket.close(code, error["code"])
