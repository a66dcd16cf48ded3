"""Drain before a stop: new work is refused, running work ends, then connections close.

In: the order to drain; requests and connections when they begin and end.
Out: refusals, and the moment at which nothing is served any more.
Owner: one Drain per process.
"""

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_live.errors import LiveError
from sglang_live.gateway.errors import refuse

# "Service Restart" in IANA's registry of close codes (RFC 6455, 11.7): clients connect again.
CLOSE_SERVICE_RESTART = 1012
# Its reason if another server can resume the session.
RESUME = "resume"
_CLOSE_TRY_AGAIN_LATER = 1013
# A load balancer has another server at once; this one serves again only after its restart.
_RETRY_AFTER_S = 5.0
# Monitoring reads these paths until the end.
_STILL_OPEN = ("/health", "/metrics")


class DrainingError(LiveError):
    code = "server_draining"
    http_status = 503


@dataclass(eq=False)
class Drain:
    """
    Attributes:
        began: set when new work is refused.
        over: set when running work is not waited for any longer.
    """

    began: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _n_served: int = 0
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self) -> None:
        """Raises DrainingError if new work is refused."""
        if self.began.is_set():
            raise DrainingError(
                "The server is about to stop and accepts nothing new.",
                retry_after_s=_RETRY_AFTER_S,
            )

    async def until_quiet(self) -> None:
        """Wait until no request and no connection is served."""
        while self._n_served:
            self._quiet.clear()
            await self._quiet.wait()

    def begin_serving(self) -> None:
        self._n_served += 1

    def end_serving(self) -> None:
        self._n_served -= 1
        self._quiet.set()


class DrainGate:
    """ASGI middleware that counts requests and connections, and refuses new ones in a drain."""

    def __init__(self, app: ASGIApp, drain: Drain):
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            if scope["path"] not in _STILL_OPEN:
                self._drain.check()
        except DrainingError as error:
            # A kept connection would bring the next request here, to be refused too.
            later = _CLOSE_TRY_AGAIN_LATER
            await refuse(error, scope, receive, send, close_code=later, keep=False)
            return
        self._drain.begin_serving()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.end_serving()
