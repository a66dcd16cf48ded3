"""Guard of a server without keys: only programs and pages of this machine may use it.

In: HTTP requests and socket handshakes. Out: the same, or 403.
A browser lets any website open sockets and send requests to this machine. Origin names the page
of a request. If a website's name was made to resolve to this machine, Host has that name.
"""

import ipaddress
from urllib.parse import urlsplit

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_live.errors import LiveError
from sglang_live.gateway.errors import refuse


class ForeignPageError(LiveError):
    code = "foreign_page"
    http_status = 403


class SameMachine:
    """refused: counter by error code."""

    def __init__(self, app: ASGIApp, refused: Counter):
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or _is_local(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ForeignPageError(
            "Without keys this server accepts only names of its own machine, and pages that come "
            "from it: start it with --api-key or --allow-anonymous."
        )
        self._refused.labels(error.code).inc()
        await refuse(error, scope, receive, send)


def _is_local(headers: Headers) -> bool:
    # Only browsers must be recognised, and browsers send both headers.
    host, origin = headers.get("host"), headers.get("origin")
    # Image and script tags of a foreign page send no Origin, only Sec-Fetch-Site. A link that the
    # user follows is harmless.
    is_followed = headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site") == "cross-site" and not is_followed:
        return False
    is_local_host = host is None or _is_loopback(f"//{host}")
    return is_local_host and (origin is None or _is_loopback(origin))


def _is_loopback(url: str) -> bool:
    try:
        name = (urlsplit(url).hostname or "").rstrip(".")
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
