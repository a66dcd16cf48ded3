"""Guard of requests whose framing other servers on their way may read in another way.

In: HTTP requests. Out: the same, or an error and a closed connection.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_live.errors import LiveError
from sglang_live.gateway.connection_guard import InvalidRequestError
from sglang_live.gateway.errors import error_response

_MAX_HEADER_BYTES = 1 << 16


class HeadersTooLargeError(LiveError):
    code = "headers_too_large"
    http_status = 431


class Framing:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = _fault(scope["headers"]) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        response = error_response(error)
        response.headers["connection"] = "close"
        await response(scope, receive, send)


def _fault(headers: list[tuple[bytes, bytes]]) -> LiveError | None:
    # RFC 9112, 6.1: a request with two lengths may hide another one.
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        return InvalidRequestError("Content-Length beside Transfer-Encoding is not accepted.")
    if sum(len(name) + len(value) for name, value in headers) > _MAX_HEADER_BYTES:
        return HeadersTooLargeError(f"The headers may have at most {_MAX_HEADER_BYTES} bytes.")
    return None
