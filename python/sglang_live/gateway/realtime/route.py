"""The /v1/realtime route: checks of a handshake, and the protocol on its socket."""

from dataclasses import dataclass
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
    CallsOnlyError,
    ClientEventError,
    InvalidKeyError,
    NoLanguageModelError,
    cut,
    error_body,
    refuse_handshake,
)
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.rate_limits import RateLimitError
from sglang_live.gateway.realtime.client_secrets import ClientSecret, ClientSecrets
from sglang_live.gateway.realtime.conversation_session import ConversationSession
from sglang_live.gateway.realtime.events import SessionForm, event_id_of
from sglang_live.gateway.realtime.session import RealtimeSession
from sglang_live.gateway.realtime.transcription_session import (
    TRANSCRIPTION,
    TranscriptionSession,
)
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import VoiceSession

_QUERY = ("model", "intent", "call_id")
_BETA_HEADER, _BETA_SUBPROTOCOL = "realtime=v1", "openai-beta.realtime-v1"


@dataclass(frozen=True, slots=True)
class RealtimeProtocol:
    """
    preset: settings of the session from its client secret; None: the defaults.
    owner: owner of the client's key.
    transcribes: it is a session for transcription, by a model of this name.
    """

    parts: GatewayParts
    preset: SessionForm | None = None
    owner: str = ANONYMOUS
    transcribes: bool = False
    model: str | None = None

    def open(self, session: VoiceSession, outbox: Outbox) -> RealtimeSession:
        preset = self.preset
        opened: RealtimeSession
        if self.transcribes:
            opened = TranscriptionSession(
                session, outbox, self.parts, preset, self.model, self.owner
            )
        else:
            opened = ConversationSession(session, outbox, self.parts, preset, self.owner)
        opened.greet()
        return opened

    def refuse(self, outbox: Outbox, error: LiveError, frame: str | None) -> None:
        event_id = None if frame is None else event_id_of(frame)
        outbox.emit("error", error={**error_body(error), "event_id": event_id})


def realtime_link(wire: Wire, parts: GatewayParts, **settings: Any) -> CallLink:
    """settings: fields of RealtimeProtocol."""
    return CallLink(wire, parts, RealtimeProtocol(parts, **settings), kind="sess")


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
        refusal = self._refusal(socket, holders, secret)
        try:
            if refusal:
                self._parts.metrics.sessions_refused.labels(refusal["code"]).inc()
                await _refuse(socket, refusal)
                return
            link = realtime_link(
                SocketWire(socket),
                self._parts,
                preset=secret.session if secret else None,
                owner=owner,
                transcribes=_transcribes(socket, secret),
                model=socket.query_params.get("model"),
            )
            with self._parts.open_sessions.one(*holders):
                await link.run()
        except WebSocketDisconnect:
            pass  # the client left before the refusal was sent

    def _refusal(
        self, socket: WebSocket, holders: list[str], secret: ClientSecret | None
    ) -> dict[str, Any] | None:
        """holders: the key's owner, then the client secret if there is one."""
        try:
            duplex = self._parts.orchestrator.duplex_s
            if not (self._parts.config.model.has_language_model or duplex):
                raise NoLanguageModelError
            if duplex and _transcribes(socket, secret):
                raise CallsOnlyError
            self._parts.tiers.check_heard(holders[0])
            self._parts.open_sessions.check_room(*holders)
            _check_shape(socket, secret)
            # Clients name the transcription's model here.
            stock = _transcribes(socket, secret)
            named = socket.query_params.get("model")
            self._parts.check_model(named, stock=stock)
        except LiveError as error:
            return error_body(error)
        return None

    async def _deny(self, socket: WebSocket) -> None:
        self._parts.metrics.sessions_refused.labels(InvalidKeyError.code).inc()
        # OpenAI refuses the handshake with 401; clients then stop trying.
        await refuse_handshake(socket, InvalidKeyError())


def _transcribes(socket: WebSocket, secret: ClientSecret | None) -> bool:
    preset = secret.session if secret else None
    if preset is not None and preset.type == TRANSCRIPTION:
        return True
    return socket.query_params.get("intent") == TRANSCRIPTION


def _check_shape(socket: WebSocket, secret: ClientSecret | None) -> None:
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
    if (intent := socket.query_params.get("intent")) not in (None, "conversation", TRANSCRIPTION):
        raise ClientEventError(
            f"There are no sessions for {cut(str(intent))!r}, only for conversation and "
            "transcription.",
            code="unsupported_session_type",
            param="intent",
        )
    if secret is not None and secret.session and intent is not None:
        kind = "realtime" if intent == "conversation" else intent
        if kind != secret.session.type:
            raise ClientEventError(
                f"The client secret is for a session of type {secret.session.type!r}.",
                code="unsupported_session_type",
                param="intent",
            )


async def _refuse(socket: WebSocket, error: dict[str, Any]) -> None:
    event = {"type": "error", "event_id": new_id("event"), "error": {**error, "event_id": None}}
    await socket.send_text(orjson.dumps(event).decode())
    later = error["code"] == RateLimitError.code
    code = CLOSE_TRY_AGAIN_LATER if later else CLOSE_POLICY_VIOLATION
    await socket.close(code, error["code"])
