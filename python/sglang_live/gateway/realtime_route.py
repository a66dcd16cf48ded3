"""The /v1/realtime route: who may connect, to which model, and the socket as a Wire.

In: a WebSocket handshake. Out: a served RealtimeConnection, or a refusal a client understands.
"""

import logging
from typing import Any

import orjson
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from sglang_live.errors import ModelNotFoundError
from sglang_live.gateway.auth import Keys, choose_subprotocol
from sglang_live.gateway.event_error import ClientEventError, error_body
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.realtime import CLOSE_POLICY_VIOLATION, RealtimeConnection
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
    def __init__(self, services: RealtimeServices, keys: Keys):
        self._services = services
        self._keys = keys

    async def __call__(self, socket: WebSocket) -> None:
        offered = socket.scope.get("subprotocols", [])
        if not self._keys.allow(socket.headers, offered):
            await self._deny(socket)
            return
        await socket.accept(choose_subprotocol(offered))
        refusal = self._refusal(socket)
        try:
            if refusal:
                self._services.metrics.sessions_refused.labels(refusal["code"]).inc()
                await _refuse(socket, refusal)
            else:
                await RealtimeConnection(SocketWire(socket), self._services).run()
        except WebSocketDisconnect:
            pass  # gone before it was told why

    def _refusal(self, socket: WebSocket) -> dict[str, Any] | None:
        known = self._services.orchestrator.model_name
        if socket.query_params.get("intent") == "transcription":
            error = ClientEventError(
                "Transcription-only sessions are not supported.",
                code="unsupported_session_type",
                param="intent",
            )
            return error_body(error)
        # Without a name the client takes what there is.
        model = socket.query_params.get("model", known)
        if model == known:
            return None
        message = f"The model '{model}' does not exist. Available models: {known}."
        return {**error_body(ModelNotFoundError(message)), "param": "model"}

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
    await socket.close(CLOSE_POLICY_VIOLATION, error["code"])
