"""Streams a response of SGLang's own API to a client, chunk by chunk.

In: the upstream's response. Out: the same, or a JSON error while nothing was sent.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sglang_live.errors import (
    BadInputError,
    ContextLengthError,
    DeadlineError,
    LiveError,
    StageFailedError,
    StageUnavailableError,
)
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.http.body import until_left
from sglang_live.gateway.native.request_check import CheckedRequest
from sglang_live.gateway.native.routes import OF_A_MODEL, returned
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_MAX_EARLY_BYTES = 1 << 20
# The parameter that holds the prompt; /generate has several.
_PROMPT_AT = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}


_DATA = b"data: {"
_ERROR = b'data: {"error"'


class TierEcho:
    """Writes `service_tier` into responses of SGLang, which knows no tiers on these routes.

    In a stream, into each object; nothing else changes. A line is passed on when it is complete.

    served: the tier.
    streams: whether the response is a stream of server-sent events.
    """

    def __init__(self, served: str, streams: bool):
        self._field = b'"service_tier":"%s",' % served.encode()
        self._streams = streams
        self._rest = b""  # of a line that is not complete, or of a body before its object
        self._done = False  # for a body that is one object

    def push(self, piece: bytes) -> bytes:
        return self._pushed_events(piece) if self._streams else self._pushed_object(piece)

    def finish(self) -> bytes:
        rest, self._rest = self._rest, b""
        return self._with_field(rest) if self._streams else rest

    def _pushed_object(self, piece: bytes) -> bytes:
        if self._done:
            return piece
        self._rest += piece
        begin = self._rest.find(b"{")
        if begin < 0:
            return b""
        body, self._rest = self._rest, b""
        self._done = True
        return body[: begin + 1] + self._field + body[begin + 1 :]

    def _pushed_events(self, piece: bytes) -> bytes:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return b"".join(self._with_field(line) + b"\n" for line in lines)

    def _with_field(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or line.startswith(_ERROR):
            return line
        return _DATA + self._field + line[len(_DATA) :]


@dataclass
class Ending:
    """How a response ended.

    broken: the upstream's connection broke.
    hung_up: the client hung up, or the time ran out.
    """

    broken: bool = False
    hung_up: bool = False


class Relay(Response):
    """Sends an upstream response on, and hangs up upstream when the client hangs up.

    held: what the request holds, until the response has ended.
    ending: filled in before `held` is closed.
    checked: the request.
    limit_s: longest time of the response; None: no limit.
    """

    def __init__(
        self,
        upstream: Awaitable[aiohttp.ClientResponse],
        route: str,
        metrics: GatewayMetrics,
        held: AsyncExitStack,
        ending: Ending,
        checked: CheckedRequest,
        limit_s: float | None = None,
    ):
        self._upstream = upstream
        self._route = route
        self._metrics = metrics
        self._held = held
        self._ending = ending
        self._streams = checked.streams
        self._tier = checked.tier
        self._limit_s = limit_s
        self._begun = False  # whether the client has the status
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relay = asyncio.create_task(self._relay(scope, receive, send))
        gone = asyncio.create_task(until_left(receive))
        async with self._held:
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
                self._ending.broken |= isinstance(failed, aiohttp.ClientError)
                self._ending.hung_up = relay.cancelled()
        if not relay.cancelled():
            relay.result()
        elif expired and not self._begun:
            error = DeadlineError(f"The response was not complete within {self._limit_s:g} s.")
            await error_response(error)(scope, receive, send)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._upstream
        except (aiohttp.ClientError, TimeoutError) as error:
            self._ending.broken = True
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


# --- what clients see of SGLang's responses ---


# Of some 600 fields only sizes: no keys, ports, paths or parts of the command line.
_SERVER_FIELDS = (
    "version",
    "served_model_name",
    "context_length",
    "max_total_num_tokens",
    "max_req_input_len",
    "max_running_requests",
    "chunked_prefill_size",
    "page_size",
    "dtype",
    "kv_cache_dtype",
    "device",
    "tp_size",
    "dp_size",
    "attention_backend",
    "schedule_policy",
)
# Messages of SGLang's tokenizer and scheduler for prompts that do not fit. SGLang's code is 400.
_TOO_LONG = re.compile(
    r"longer than the model's context length|exceeds the (model's maximum context length"
    r"|maximum allowed length \()"
)
_PATHS = ("model_path", "tokenizer_path")


def server_info(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in _SERVER_FIELDS if name in info}


def model_info(info: dict[str, Any]) -> dict[str, Any]:
    """Reduces paths to their last part, by which clients choose a chat template."""
    kept = {name: value for name, value in info.items() if name != "preferred_sampling_params"}
    return kept | {n: Path(kept[n]).name for n in _PATHS if isinstance(kept.get(n), str)}


def too_long(body: bytes) -> ContextLengthError | None:
    """Returns the error of a response of status 400 if its prompt exceeds the context."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    fault = data.get("error", data) if isinstance(data, dict) else None
    message = fault.get("message") if isinstance(fault, dict) else None
    if isinstance(message, str) and _TOO_LONG.search(message):
        return ContextLengthError(message)
    return None


def early_error(event: bytes) -> LiveError | None:
    """Returns the error in the first event of a stream; None if the event is output."""
    if not event.startswith(b"data:"):
        return None
    try:
        data = orjson.loads(event[5:].strip())
    except orjson.JSONDecodeError:
        return None
    if not isinstance(data, dict):
        return None
    fault = data.get("error")
    if fault is None:
        meta = data.get("meta_info")
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        if not isinstance(reason, dict) or reason.get("type") != "abort":
            return None
        fault = {"message": reason.get("message"), "code": reason.get("status_code") or 400}
    if not isinstance(fault, dict):
        fault = {"message": str(fault)}
    code, message = fault.get("code"), str(fault.get("message") or "the engine refused it")
    if _TOO_LONG.search(message):
        return ContextLengthError(message)
    is_bad_input = isinstance(code, int) and 400 <= code < 500
    return BadInputError(message) if is_bad_input or code is None else StageFailedError(message)
