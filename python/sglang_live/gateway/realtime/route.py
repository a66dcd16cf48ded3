"""The /v1/realtime route: checks of a handshake, and the socket as a Wire.

In: a WebSocket handshake. Out: a served RealtimeConnection, or an error in the protocol's form.
"""

import logging
from collections import Counter
from typing import Any

import orjson
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import Keys, choose_subprotocol, offered_keys
from sglang_live.gateway.errors import ClientEventError, NoLanguageModelError, cut, error_body
from sglang_live.gateway.flex.tier import Tiers
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.model import check_model
from sglang_live.gateway.rate_limits import RateLimitError
from sglang_live.gateway.realtime.client_secrets import ClientSecrets
from sglang_live.gateway.realtime.connection import (
    CLOSE_POLICY_VIOLATION,
    CLOSE_TRY_AGAIN_LATER,
    RealtimeConnection,
)
from sglang_live.gateway.realtime.events import SessionForm
from sglang_live.gateway.realtime.services import RealtimeServices

log = logging.getLogger(__name__)

_QUERY = ("model", "intent", "call_id")
_BETA_HEADER, _BETA_SUBPROTOCOL = "realtime=v1", "openai-beta.realtime-v1"


class TooManySessionsError(RateLimitError):
    """One key, or one client secret, has its limit of sessions open."""


class SocketWire:
    """A Starlette socket as a Wire."""

    def __init__(self, socket: WebSocket):
        self._socket = socket

    async def receive(self) -> str | bytes | None:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text = message.get("text")
        return text if text is not None else message.get("bytes") or b""

    async def send(self, frame: str) -> None:
        await self._socket.send_text(frame)

    async def close(self, code: int, reason: str) -> None:
        await self._socket.close(code, reason)


class RealtimeRoute:
    def __init__(self, services: RealtimeServices, keys: Keys, secrets: ClientSecrets):
        self._services, self._keys, self._secrets = services, keys, secrets
        self._tiers = Tiers(services.config.batch_only_keys)
        self._open: Counter[str] = Counter()  # sessions by key, and by client secret

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
                self._services.metrics.sessions_refused.labels(refusal["code"]).inc()
                await _refuse(socket, refusal)
            else:
                await self._serve(socket, holders, secret.session if secret else None)
        except WebSocketDisconnect:
            pass  # the client left before the refusal was sent

    async def _serve(
        self, socket: WebSocket, holders: list[str], preset: SessionForm | None
    ) -> None:
        """holders: the key's owner, then the client secret if there is one."""
        self._open.update(holders)
        try:
            wire = SocketWire(socket)
            await RealtimeConnection(wire, self._services, preset, holders[0]).run()
        finally:
            self._open.subtract(holders)
            self._open += Counter()  # removes counts of zero

    def _refusal(self, socket: WebSocket, holders: list[str]) -> dict[str, Any] | None:
        try:
            if not self._services.config.has_language_model:
                raise NoLanguageModelError
            self._tiers.check_heard(holders[0])
            self._check_room(*holders)
            _check_shape(socket)
            check_model(self._services.orchestrator.model_name, socket.query_params.get("model"))
        except LiveError as error:
            return error_body(error)
        return None

    def _check_room(self, owner: str, secret: str | None = None) -> None:
        config = self._services.config
        limit = config.max_sessions_per_key
        if limit is not None and self._open[owner] >= limit:
            raise TooManySessionsError(f"This key has {limit} sessions open, its limit.")
        limit = config.max_sessions_per_secret
        if secret is not None and self._open[secret] >= limit:
            raise TooManySessionsError(f"This client secret has {limit} sessions open, its limit.")

    async def _deny(self, socket: WebSocket) -> None:
        self._services.metrics.sessions_refused.labels("invalid_api_key").inc()
        if "websocket.http.response" in socket.scope.get("extensions", {}):
            # OpenAI refuses the handshake with 401; clients then stop trying.
            await socket.send_denial_response(unauthorized())
        else:
            await socket.close(CLOSE_POLICY_VIOLATION, "invalid_api_key")


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


def unauthorized() -> JSONResponse:
    error = {
        "type": "invalid_request_error",
        "code": "invalid_api_key",
        "message": "Incorrect API key provided.",
        "param": None,
    }
    return JSONResponse({"error": error}, status_code=401, headers={"WWW-Authenticate": "Bearer"})


async def _refuse(socket: WebSocket, error: dict[str, Any]) -> None:
    event = {"type": "error", "event_id": new_id("event"), "error": {**error, "event_id": None}}
    await socket.send_text(orjson.dumps(event).decode())
    later = error["code"] == RateLimitError.code
    code = CLOSE_TRY_AGAIN_LATER if later else CLOSE_POLICY_VIOLATION
    await socket.close(code, error["code"])
