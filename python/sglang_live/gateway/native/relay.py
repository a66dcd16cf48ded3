"""Streams a response of SGLang's own API to a client, chunk by chunk.

In: the upstream's response. Out: the same, or a JSON error while nothing was sent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import aiohttp
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sglang_live.errors import ContextLengthError, DeadlineError, StageUnavailableError
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.flex.echo import TierEcho
from sglang_live.gateway.native.request_check import CheckedRequest
from sglang_live.gateway.native.responses import early_error, too_long
from sglang_live.gateway.native.routes import OF_A_MODEL, returned
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_MAX_EARLY_BYTES = 1 << 20
# The parameter that holds the prompt; /generate has several.
_PROMPT_AT = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}


class Relay(Response):
    """Sends an upstream response on, and hangs up upstream when the client hangs up.

    on_end: called once, with whether the upstream's connection broke, and whether the client hung
        up or the time ran out.
    checked: the request.
    limit_s: longest time of the response; None: no limit.
    """

    def __init__(
        self,
        upstream: Awaitable[aiohttp.ClientResponse],
        route: str,
        metrics: GatewayMetrics,
        on_end: Callable[[bool, bool], None],
        checked: CheckedRequest,
        limit_s: float | None = None,
    ):
        self._upstream, self._on_end, self._streams = upstream, on_end, checked.streams
        self._route, self._tier, self._limit_s = route, checked.tier, limit_s
        self._begun = False  # whether the client has the status
        self._metrics = metrics
        self._broke = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relay = asyncio.create_task(self._relay(scope, receive, send))
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait(
                {relay, gone}, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            expired = not relay.done() and not gone.done()
            # Cancelling closes the upstream connection; SGLang then aborts the request.
            if not relay.done():
                why = "expired" if expired else "disconnected"
                self._metrics.proxied.labels(self._route, why).inc()
                relay.cancel()
            gone.cancel()
            await asyncio.gather(relay, gone, return_exceptions=True)
            failed = None if relay.cancelled() else relay.exception()
            self._on_end(self._broke or isinstance(failed, aiohttp.ClientError), relay.cancelled())
        if not relay.cancelled():
            relay.result()
        elif expired and not self._begun:
            error = DeadlineError(f"The response was not complete within {self._limit_s:g} s.")
            await error_response(error)(scope, receive, send)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._upstream
        except (aiohttp.ClientError, TimeoutError) as error:
            self._broke = True
            failure = unreachable(self._route, error)
            self._metrics.proxied.labels(self._route, str(failure.status_code)).inc()
            await failure(scope, receive, send)
            return
        try:
            early = await self._early(response) if self._streams else b""
            fault = early_error(early.partition(b"\n\n")[0]) if response.status == 200 else None
            if response.status == 400:
                early += await response.read()
                fault = too_long(early)
            if isinstance(fault, ContextLengthError):
                fault.param = _PROMPT_AT.get(self._route)
            if fault is not None:
                self._metrics.proxied.labels(self._route, str(fault.http_status)).inc()
                await error_response(fault)(scope, receive, send)
                return
            self._metrics.proxied.labels(self._route, str(response.status)).inc()
            headers = returned(response.headers)
            headers += [(n.encode(), v.encode()) for n, v in self._tier.headers().items()]
            self._begun = True
            await send(
                {"type": "http.response.start", "status": response.status, "headers": headers}
            )
            echo = self._echo(response)
            if early:
                await self._send_piece(send, echo.push(early) if echo else early)
            async for chunk in response.content.iter_any():
                await self._send_piece(send, echo.push(chunk) if echo else chunk)
            rest = echo.finish() if echo else b""
            await send({"type": "http.response.body", "body": rest, "more_body": False})
        finally:
            response.close()

    def _echo(self, response: aiohttp.ClientResponse) -> TierEcho | None:
        """None: the response does not name its tier, and is passed on unchanged."""
        if response.status != 200 or self._route not in OF_A_MODEL or not self._tier.named:
            return None
        return TierEcho(self._tier.served, self._streams)

    async def _send_piece(self, send: Send, piece: bytes) -> None:
        if piece:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _early(self, response: aiohttp.ClientResponse) -> bytes:
        """Read the first event: an error in it can still become the status of the response."""
        early = b""
        while b"\n\n" not in early and len(early) < _MAX_EARLY_BYTES:
            chunk = await response.content.readany()
            if not chunk:
                break
            early += chunk
        return early


def unreachable(route: str, error: Exception) -> JSONResponse:
    log.warning("native_unreachable route=%s error=%r", route, error)
    return error_response(StageUnavailableError("SGLang's own API does not respond."))


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
