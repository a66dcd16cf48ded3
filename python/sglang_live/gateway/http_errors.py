"""Errors as answers to HTTP requests and WebSocket handshakes, in OpenAI's form."""

import logging

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.event_error import cut, error_body, internal_error

log = logging.getLogger(__name__)

REALTIME_PATH = "/v1/realtime"
_CODES = {404: "unknown_url", 405: "method_not_supported", 413: "request_too_large"}
_CLOSE_POLICY_VIOLATION = 1008


class UnknownUrlError(BadInputError):
    code = "unknown_url"
    http_status = 404


class UpgradeError(BadInputError):
    code = "upgrade_required"
    http_status = 426


def error_response(error: LiveError) -> JSONResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse({"error": error_body(error)}, error.http_status, headers)


def add_error_forms(app: FastAPI) -> None:
    """What the framework itself refuses, and what crashes, is told as everything else is."""
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _crashed)
    app.router.default = unknown_path


async def unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application of the paths that there are not."""
    if scope["type"] == "websocket":
        error = UnknownUrlError(
            f"There is no WebSocket at {cut(scope['path'])}. The realtime API is at "
            f"{REALTIME_PATH}?model=NAME."
        )
        await refuse_handshake(WebSocket(scope, receive, send), error)
        return
    if scope["path"] == REALTIME_PATH:
        error = UpgradeError(f"{REALTIME_PATH} is a WebSocket: ask with 'Upgrade: websocket'.")
        answer = error_response(error)
        answer.headers["Upgrade"] = "websocket"
    else:
        asked = f"{scope['method']} {cut(scope['path'])}"
        answer = error_response(UnknownUrlError(f"Unknown request URL: {asked}."))
    await answer(scope, receive, send)


async def refuse_handshake(socket: WebSocket, error: LiveError) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(error_response(error))
    else:
        await socket.close(_CLOSE_POLICY_VIOLATION, error.code)


async def _refused(request: Request, error: HTTPException) -> Response:
    told = LiveError(f"{error.detail}: {request.method} {cut(request.scope['path'])}.")
    told.code = _CODES.get(error.status_code, "invalid_request")
    told.http_status = error.status_code
    answer = error_response(told)
    answer.headers.update(error.headers or {})
    return answer


async def _crashed(request: Request, error: Exception) -> Response:
    # The server logs the traceback when it gets the error again.
    log.error("request_crashed method=%s path=%r", request.method, request.scope["path"])
    return error_response(internal_error())
