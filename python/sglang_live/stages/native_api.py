"""The routes of SGLang's own HTTP application that a stage serves, and their key.

SGLang's application can also load weights, write requests to disk and stop the engine, without a
key and with CORS for every website. Owner: engine_host, once per engine that serves it.
"""

import hmac

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

# The routes that the gateway's proxy forwards.
NATIVE_ROUTES = frozenset(
    (
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/tokenize",
        "/v1/detokenize",
        "/get_model_info",
        "/model_info",
        "/get_server_info",
        "/server_info",
        "/health_generate",
        "/flush_cache",
        "/open_session",
        "/close_session",
        "/abort_request",
    )
)


def restrict(app: Starlette) -> None:
    """Remove CORS and all routes but NATIVE_ROUTES from SGLang's application.

    Raises:
        RuntimeError: SGLang does not have one of the routes.
    """
    kept = [route for route in app.router.routes if _path(route) in NATIVE_ROUTES]
    missing = NATIVE_ROUTES - {_path(route) for route in kept}
    if missing:
        raise RuntimeError(f"SGLang does not serve {', '.join(sorted(missing))}")
    app.router.routes[:] = kept
    app.user_middleware[:] = [m for m in app.user_middleware if m.cls is not CORSMiddleware]


class KeyGuard:
    """Passes on requests with the key as a bearer token; responds to others with 401."""

    def __init__(self, app: ASGIApp, key: str):
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if scope["type"] != "http" or not hmac.compare_digest(given, self._expected):
                await JSONResponse({"error": "no key"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _path(route: BaseRoute) -> str:
    return getattr(route, "path", "")
