"""Errors of the gateway, and the forms in which a client gets them.

In: errors of client events, HTTP requests and handshakes. Out: OpenAI's `error` object, alone or
in an HTTP response.
"""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from sglang_live.errors import BadInputError, LiveError

log = logging.getLogger(__name__)

REALTIME_PATH, LIVE_PATH = "/v1/realtime", "/v1/live/sessions"
_CODES = {404: "unknown_url", 405: "method_not_supported", 413: "request_too_large"}
CLOSE_POLICY_VIOLATION = 1008
# Errors quote the faulty input, which may be as long as a whole frame.
_MAX_MESSAGE, _MAX_PARAM = 1000, 256
# nginx's status for a client that closes its connection before the response.
_CLIENT_CLOSED_REQUEST = 499


class ClientEventError(BadInputError):
    """One client event is wrong and had no effect.

    Attributes:
        code: protocol error code; some clients act on it.
        param: path of the faulty field, such as "session.audio.output.voice", or None.
    """

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None):
        super().__init__(message)
        self.code = code
        self.param = param


class ParameterError(ClientEventError):
    """A parameter of an HTTP request is wrong.

    param: its place in the body, such as `sampling_params.n`.
    is_kind: whether the value has the right type.
    """

    def __init__(self, param: str, message: str, *, is_kind: bool = True):
        code = "invalid_value" if is_kind else "invalid_type"
        super().__init__(f"{cut(param)}: {message}", code=code, param=param)


class UnknownUrlError(BadInputError):
    code = "unknown_url"
    http_status = 404


class NoLanguageModelError(BadInputError):
    """The server only speaks text."""

    code = "no_language_model"
    http_status = 404

    def __init__(self) -> None:
        super().__init__(
            "This server has no language model, only a voice: it speaks the text of POST "
            "/v1/audio/speech."
        )


class CallsOnlyError(BadInputError):
    """The server's model hears while it speaks, and does nothing else."""

    code = "calls_only"
    http_status = 404

    def __init__(self) -> None:
        super().__init__(
            "This server's model hears and speaks at the same time: it takes calls, at the "
            "WebSockets /v1/realtime and /v1/live/sessions."
        )


class OwnWordsError(BadInputError):
    """The server's model writes the codes of its speech, as part of a response alone."""

    code = "own_words_only"
    http_status = 404

    def __init__(self) -> None:
        super().__init__(
            "This server's model speaks its own words alone: ask it at POST /v1/chat/completions "
            "or the WebSocket /v1/realtime."
        )


class UpgradeError(BadInputError):
    code = "upgrade_required"
    http_status = 426
    headers: ClassVar[Mapping[str, str]] = {"Upgrade": "websocket"}

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is a WebSocket: send 'Upgrade: websocket'.")


class InvalidKeyError(BadInputError):
    code = "invalid_api_key"
    http_status = 401
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}

    def __init__(self) -> None:
        super().__init__("Incorrect API key provided.")


def cut(text: str, n_characters: int = 80) -> str:
    return text if len(text) <= n_characters else text[:n_characters] + "…"


def error_body(error: LiveError) -> dict[str, Any]:
    """The fields that all error objects share: type, code, message, param."""
    param = getattr(error, "param", None)
    return {
        "type": "server_error" if error.http_status >= 500 else "invalid_request_error",
        "code": error.code,
        "message": cut(str(error), _MAX_MESSAGE),
        "param": param and cut(param, _MAX_PARAM),
    }


def internal_error() -> LiveError:
    """The error that a client gets for a bug of the server; the log has the traceback."""
    return LiveError("The server had an error while processing this event.")


def error_response(error: LiveError) -> JSONResponse:
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse({"error": error_body(error)}, error.http_status, headers)


async def refuse(
    error: LiveError,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    close_code: int = CLOSE_POLICY_VIOLATION,
    keep: bool = True,
) -> None:
    """Refuse a request or a handshake, as an ASGI application.

    Args:
        close_code: of a socket whose server has no responses to handshakes.
        keep: whether the connection of a request may stay.
    """
    if scope["type"] == "websocket":
        await refuse_handshake(WebSocket(scope, receive, send), error, close_code)
        return
    response = error_response(error)
    if not keep:
        response.headers["connection"] = "close"
    await response(scope, receive, send)


async def refuse_handshake(
    socket: WebSocket, error: LiveError, close_code: int = CLOSE_POLICY_VIOLATION
) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(error_response(error))
    else:
        await socket.close(close_code, error.code)


async def unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application that refuses every path without a route."""
    path = scope["path"]
    if scope["type"] == "websocket":
        message = (
            f"There is no WebSocket at {cut(path)}. The realtime API is at "
            f"{REALTIME_PATH}?model=NAME, the Live API at {LIVE_PATH}."
        )
        await refuse(UnknownUrlError(message), scope, receive, send)
    elif path == REALTIME_PATH:
        await refuse(UpgradeError(path), scope, receive, send)
    else:
        message = f"Unknown request URL: {scope['method']} {cut(path)}."
        await refuse(UnknownUrlError(message), scope, receive, send)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = LiveError(f"{error.detail}: {request.method} {cut(request.scope['path'])}.")
    shown.code = _CODES.get(error.status_code, "invalid_request")
    shown.http_status = error.status_code
    response = error_response(shown)
    response.headers.update(error.headers or {})
    return response


async def _client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _crashed(request: Request, error: Exception) -> Response:
    # The framework raises the error again after this response; the server logs its traceback.
    log.error("request_crashed method=%s path=%r", request.method, request.scope["path"])
    return error_response(internal_error())


async def _refused_by(_request: Request, error: Exception) -> Response:
    assert isinstance(error, LiveError)
    return error_response(error)


# Errors of routes, of the framework, and crashes have the form of all other errors.
ERROR_FORMS = {
    LiveError: _refused_by,
    HTTPException: _refused,
    ClientDisconnect: _client_left,
    Exception: _crashed,
}
