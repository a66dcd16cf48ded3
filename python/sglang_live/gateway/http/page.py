"""The page at `/`, on which a user talks to the server from a browser.

In: GET requests. Out: the files of gateway/web and a recorded question.
"""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from sglang_live.errors import LiveError
from sglang_live.gateway.errors import unknown_path

_PACKAGE = Path(__file__).parents[2]
_WEB = _PACKAGE / "gateway" / "web"
_CLIP = _PACKAGE / "assets" / "question.flac"
_HEADERS = {
    # The page loads nothing from other hosts. No other page may frame it: it uses a microphone.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class _Web(StaticFiles):
    """The folder of the page, also of index.html."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await unknown_path(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


async def notice(why: LiveError, _request: Request) -> Response:
    """What `/` shows in the place of the page, where there is nothing to talk with."""
    voices = "GET /v1/audio/voices lists its voices."
    return PlainTextResponse(f"{why}\n{voices}\n")


def page_routes(model: dict[str, Any]) -> list[BaseRoute]:
    """The page's routes. They need no key: the page itself requests one from its user.

    model: what the page shows of the model; {}: nothing.
    """

    async def page(_request: Request) -> Response:
        return FileResponse(_WEB / "index.html", media_type="text/html", headers=_HEADERS)

    async def about(_request: Request) -> Response:
        return JSONResponse(model)

    async def clip(_request: Request) -> Response:
        return FileResponse(_CLIP, media_type="audio/flac")

    return [
        Route("/", page),
        Route("/page/model.json", about),
        Route("/page/question.flac", clip),
        Mount("/page", _Web(directory=_WEB)),
    ]
