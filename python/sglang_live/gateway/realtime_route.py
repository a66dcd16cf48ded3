"""The /v1/realtime route: who may connect, to which model, and the socket as a Wire.

In: a WebSocket handshake. Out: a served RealtimeConnection, or a refusal a client understands.
"""

import logging
from collections import Counter
from typing import Any

import orjson
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from sglang_live.errors import ModelNotFoundError
from sglang_live.gateway.auth import Keys, choose_subprotocol, offered_keys
from sglang_live.gateway.client_secrets import ClientSecrets
from sglang_live.gateway.event_error import ClientEventError, error_body
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.model import check_model
from sglang_live.gateway.rate_limits import RateLimitError
from sglang_live.gateway.realtime import (
    CLOSE_POLICY_VIOLATION,
    CLOSE_TRY_AGAIN_LATER,
    RealtimeConnection,
)
from sglang_live.gateway.realtime_events import SessionForm
from sglang_live.gateway.services import RealtimeServices

log = logging.getLogger(__name__)


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
        self._open: Counter[str] = Counter()  # sessions by key

    async def __call__(self, socket: WebSocket) -> None:
        offered = socket.scope.get("subprotocols", [])
        secret = self._secrets.find(offered_keys(socket.headers, offered))
        if secret is None and not self._keys.allow(socket.headers, offered):
            await self._deny(socket)
            return
        owner = secret.owner if secret else self._keys.owner(socket.headers, offered)
        await socket.accept(choose_subprotocol(offered))
        refusal = self._refusal(socket, owner)
        try:
            if refusal:
                self._services.metrics.sessions_refused.labels(refusal["code"]).inc()
                await _refuse(socket, refusal)
            else:
                await self._serve(socket, owner, secret.session if secret else None)
        except WebSocketDisconnect:
            pass  # gone before it was told why

    async def _serve(self, socket: WebSocket, owner: str, preset: SessionForm | None) -> None:
        self._open[owner] += 1
        try:
            await RealtimeConnection(SocketWire(socket), self._services, preset, owner).run()
        finally:
            self._open[owner] -= 1
            self._open += Counter()  # who has none left is not remembered

    def _refusal(self, socket: WebSocket, owner: str) -> dict[str, Any] | None:
        limit = self._services.config.max_sessions_per_key
        if limit is not None and self._open[owner] >= limit:
            return error_body(RateLimitError(f"This key has {limit} calls open, its limit."))
        if socket.query_params.get("intent") == "transcription":
            error = ClientEventError(
                "Transcription-only sessions are not supported.",
                code="unsupported_session_type",
                param="intent",
            )
            return error_body(error)
        try:
            check_model(self._services.orchestrator, socket.query_params.get("model"))
        except ModelNotFoundError as error:
            return {**error_body(error), "param": "model"}
        return None

    async def _deny(self, socket: WebSocket) -> None:
        self._services.metrics.sessions_refused.labels("invalid_api_key").inc()
        if "websocket.http.response" in socket.scope.get("extensions", {}):
            # OpenAI answers a wrong key with 401 instead of a socket; clients stop trying then.
            await socket.send_denial_response(unauthorized())
        else:
            await socket.close(CLOSE_POLICY_VIOLATION, "invalid_api_key")


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
