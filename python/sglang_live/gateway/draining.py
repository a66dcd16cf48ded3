"""The end of service: nothing new is taken, what runs is finished, then connections close.

In: the order to drain, requests and connections as they come and go. Out: refusals, and the moment
from which nothing is under way.
Owner: one Drain per process.
"""

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from sglang_live.errors import LiveError
from sglang_live.gateway.errors import error_response

# Service restart, of the registry that RFC 6455 section 7.4.1 founded: clients connect again.
CLOSE_SERVICE_RESTART = 1012
_CLOSE_TRY_AGAIN_LATER = 1013
# Another server answers at once, this one not before it is started anew.
_RETRY_AFTER_S = 5.0
# Who watches over the server still sees it.
_STILL_OPEN = ("/health", "/metrics")


class DrainingError(LiveError):
    code = "server_draining"
    http_status = 503


@dataclass(eq=False)
class Drain:
    """
    Attributes:
        began: nothing new is taken from now on. over: what still runs is not waited for.
    """

    began: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _n_served: int = 0
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self) -> None:
        """Raises DrainingError if nothing new is taken."""
        if self.began.is_set():
            raise DrainingError(
                "The server is about to stop and takes nothing new.", retry_after_s=_RETRY_AFTER_S
            )

    async def until_quiet(self) -> None:
        """No request and no connection is served any more."""
        while self._n_served:
            self._quiet.clear()
            await self._quiet.wait()

    def came(self) -> None:
        self._n_served += 1

    def went(self) -> None:
        self._n_served -= 1
        self._quiet.set()


class DrainGate:
    """ASGI middleware that counts what is served, and refuses what comes when a drain has begun."""

    def __init__(self, app: ASGIApp, drain: Drain):
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            if scope["path"] not in _STILL_OPEN:
                self._drain.check()
        except DrainingError as error:
            await _refuse(error, scope, receive, send)
            return
        self._drain.came()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.went()


async def _refuse(error: DrainingError, scope: Scope, receive: Receive, send: Send) -> None:
    answer = error_response(error)
    if scope["type"] == "http":
        # The connection would be kept for a request that is refused as well.
        answer.headers["connection"] = "close"
        await answer(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        await WebSocket(scope, receive, send).send_denial_response(answer)
    else:
        await WebSocket(scope, receive, send).close(_CLOSE_TRY_AGAIN_LATER, error.code)
