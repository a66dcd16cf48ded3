"""Who may use a server without keys: programs of this machine, and pages that come from it.

In: HTTP requests and socket handshakes. Out: the same, or 403.
A browser lets any website open sockets and send requests to this machine. It says in Origin whose
page asks; and where a website's name was made to mean this machine, Host has that name.
"""

import ipaddress
from urllib.parse import urlsplit

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from sglang_live.errors import LiveError
from sglang_live.gateway.errors import error_response


class ForeignPageError(LiveError):
    code = "foreign_page"
    http_status = 403


class SameMachine:
    """refused: counts, by code."""

    def __init__(self, app: ASGIApp, refused: Counter):
        self._app, self._refused = app, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or _is_local(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ForeignPageError(
            "Without keys this server answers to names of its own machine only, and to pages that "
            "come from there: give it an --api-key, or --allow-anonymous."
        )
        self._refused.labels(error.code).inc()
        answer = error_response(error)
        if scope["type"] == "http":
            await answer(scope, receive, send)
        elif "websocket.http.response" in scope.get("extensions", {}):
            await WebSocket(scope, receive, send).send_denial_response(answer)
        else:
            await WebSocket(scope, receive, send).close(1008, error.code)


def _is_local(headers: Headers) -> bool:
    # Only browsers must be recognised, and those send both.
    host, origin = headers.get("host"), headers.get("origin")
    # An image or script tag of a page sends no Origin; a link that was followed is harmless.
    is_followed = headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site") == "cross-site" and not is_followed:
        return False
    is_named_so = host is None or _is_loopback(f"//{host}")
    return is_named_so and (origin is None or _is_loopback(origin))


def _is_loopback(url: str) -> bool:
    try:
        name = (urlsplit(url).hostname or "").rstrip(".")
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
