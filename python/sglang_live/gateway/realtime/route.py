"""The /v1/realtime route: checks of a handshake, and the protocol on its socket."""

from typing import TYPE_CHECKING, Any

import orjson
from starlette.datastructures import QueryParams
from starlette.websockets import WebSocket, WebSocketDisconnect

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import choose_subprotocol, offered_keys
from sglang_live.gateway.call.resumption import ResumeTokenError
from sglang_live.gateway.call.wire import CLOSE_TRY_AGAIN_LATER, SocketWire
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
from sglang_live.gateway.realtime.calls import RealtimeCalls
from sglang_live.gateway.realtime.client_secrets import ClientSecret, ClientSecrets
from sglang_live.gateway.realtime.protocol import realtime_link
from sglang_live.gateway.realtime.transcription_session import TRANSCRIPTION
from sglang_live.gateway.webrtc.calls import NoSuchCallError
from sglang_live.ids import new_id

if TYPE_CHECKING:  # without a journal it is not imported
    from sglang_live.gateway.call.saved_call import SavedCall

_OF_RESUME = ("after", "heard_ms", "item_id")
_QUERY = ("model", "intent", "call_id", "resume", *_OF_RESUME)
# A resumed session has its settings.
_NOT_WITH_RESUME = ("intent", "call_id")
_MOST_DIGITS = 8
_LATER = (429, 503)
_BETA_HEADER, _BETA_SUBPROTOCOL = "realtime=v1", "openai-beta.realtime-v1"


class RealtimeRoute:
    def __init__(self, parts: GatewayParts, secrets: ClientSecrets, calls: RealtimeCalls):
        self._parts = parts
        self._calls = calls
        self._keys = parts.keys
        self._secrets = secrets

    async def __call__(self, socket: WebSocket) -> None:
        offered = socket.scope.get("subprotocols", [])
        secret = await self._secrets.find(offered_keys(socket.headers, offered))
        if secret is None and not self._keys.allow(socket.headers, offered):
            await self._deny(socket)
            return
        owner = secret.owner if secret else self._keys.owner(socket.headers, offered)
        await socket.accept(choose_subprotocol(offered))
        refusal = self._refusal(socket, owner, secret)
        try:
            if refusal:
                self._parts.metrics.sessions_refused.labels(refusal["code"]).inc()
                await _refuse(socket, refusal)
                return
            if "resume" in socket.query_params:
                await self._resume(socket, owner)
                return
            if (call_id := socket.query_params.get("call_id")) is not None:
                await self._attach(socket, call_id, owner)
                return
            try:
                counted = await self._parts.open_sessions.open(
                    owner, secret.value if secret else None
                )
            except RateLimitError as error:
                self._parts.metrics.sessions_refused.labels(error.code).inc()
                await _refuse(socket, error_body(error))
                return
            with counted:
                link = realtime_link(
                    SocketWire(socket),
                    self._parts,
                    preset=secret.session if secret else None,
                    owner=owner,
                    transcribes=_transcribes(socket, secret),
                    model=socket.query_params.get("model"),
                )
                await link.run()
        except WebSocketDisconnect:
            pass  # the client left before the refusal was sent

    async def _resume(self, socket: WebSocket, owner: str) -> None:
        query = socket.query_params
        try:
            at = query.get("after"), _heard_ms(query)
            if (call := self._parts.resumable_calls.find(query["resume"], owner)) is None:
                saved = await self._saved(query["resume"], owner, *at, query.get("item_id"))
                counted = await self._parts.open_sessions.open(owner)
            else:
                await call.check_here()
                arrival = call.join(SocketWire(socket), *at)
        except LiveError as error:
            self._parts.metrics.sessions_refused.labels(error.code).inc()
            await _refuse(socket, error_body(error), later=error.http_status in _LATER)
            return
        if call is not None:
            await arrival.left.wait()
            return
        link = realtime_link(
            SocketWire(socket),
            self._parts,
            saved=saved,
            owner=owner,
            transcribes=saved.head.kind == TRANSCRIPTION,
        )
        with counted:
            await link.run()

    async def _saved(
        self, token: str, owner: str, after: str | None, heard_ms: int | None, item: str | None
    ) -> "SavedCall":
        """A call of another gateway. Raises LiveError."""
        if (journal := self._parts.journal) is None:
            raise ResumeTokenError
        from sglang_live.gateway.call.saved_call import find_call

        saved = await find_call(journal, token, owner, after, heard_ms, item)
        return saved

    async def _attach(self, socket: WebSocket, call_id: str, owner: str) -> None:
        try:
            await self._calls.attach(socket, call_id, owner)
        except NoSuchCallError as error:
            await _refuse(socket, error_body(error))

    def _refusal(
        self, socket: WebSocket, owner: str, secret: ClientSecret | None
    ) -> dict[str, Any] | None:
        """Whatever else is open."""
        try:
            duplex = self._parts.orchestrator.duplex_s
            if not (self._parts.config.model.has_language_model or duplex):
                raise NoLanguageModelError
            if duplex and _transcribes(socket, secret):
                raise CallsOnlyError
            self._parts.tiers.check_heard(owner)
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
    is_resumed = "resume" in socket.query_params
    for name in _NOT_WITH_RESUME if is_resumed else _OF_RESUME:
        if name in socket.query_params:
            kind = "a resumed session" if is_resumed else "a new session"
            raise ClientEventError(f"{name} is not for {kind}.", param=name)
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


def _heard_ms(query: QueryParams) -> int | None:
    text = query.get("heard_ms")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise ClientEventError("heard_ms is a whole number of milliseconds.", param="heard_ms")
    return int(text)


async def _refuse(socket: WebSocket, error: dict[str, Any], *, later: bool = False) -> None:
    """later: it may not be refused then."""
    event = {"type": "error", "event_id": new_id("event"), "error": {**error, "event_id": None}}
    await socket.send_text(orjson.dumps(event).decode())
    later = later or error["code"] == RateLimitError.code
    code = CLOSE_TRY_AGAIN_LATER if later else CLOSE_POLICY_VIOLATION
    await socket.close(code, error["code"])
