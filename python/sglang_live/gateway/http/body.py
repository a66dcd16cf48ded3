"""Bounded request bodies, and clients that leave or stop reading."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from sglang_live.errors import BadInputError
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import decoder_of, read_form

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Form = TypeVar("Form")

# A client that reads nothing for 60 s has abandoned the response; a paused player still fills its
# buffer.
STALLED_AFTER_S = 60.0
# The largest body takes 600 s at 1 Mbit/s.
BODY_PAUSE_S, BODY_S = 20.0, 600.0


class BodyTooLargeError(BadInputError):
    code = "request_too_large"
    http_status = 413


class BodyTooSlowError(BadInputError):
    code = "request_timeout"
    http_status = 408


def bounded(request: Request, max_bytes: int) -> Request:
    """The same request with a bounded body.

    Reading it raises BodyTooLargeError as soon as the body exceeds max_bytes, and BodyTooSlowError
    if no byte arrives for BODY_PAUSE_S or the whole body has not arrived after BODY_S.
    """
    n_bytes = 0
    until_s = asyncio.get_running_loop().time() + BODY_S

    async def receive() -> Message:
        nonlocal n_bytes
        now_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(min(until_s, now_s + BODY_PAUSE_S)):
                message = await request.receive()
        except TimeoutError:
            raise BodyTooSlowError("The body of the request does not arrive.") from None
        n_bytes += len(message.get("body", b""))
        if n_bytes > max_bytes:
            raise BodyTooLargeError(f"The body may have at most {max_bytes} bytes.")
        return message

    return Request(request.scope, receive)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """
    Raises:
        BodyTooLargeError: the body exceeds max_bytes; its rest is not read.
        BodyTooSlowError: the body does not arrive in time.
        ClientDisconnect: the client left.
    """
    return await bounded(request, max_bytes).body()


def refuse_query(request: Request) -> None:
    """Raises ClientEventError if the URL has parameters, which the route does not read."""
    for name in request.query_params:
        raise ClientEventError(
            f"Unknown parameter in the URL: {cut(name)!r}. Send parameters in the body.",
            code="unknown_parameter",
            param=name,
        )


def read_json(body: bytes, form: type[Form]) -> Form:
    """Raises BadInputError with the path of the fault."""
    try:
        return read_form(body, decoder_of(form))
    except ClientEventError as error:
        if error.code == "invalid_event":  # HTTP has no events
            error.code = BadInputError.code
        raise


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client leaves first.

    Args:
        request: a request whose body has been read.
    Raises:
        ClientDisconnect: the client left.
    """
    result, gone = asyncio.create_task(work), asyncio.create_task(_until_disconnect(request))
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        gone.cancel()
        result.cancel()
        await asyncio.wait({result, gone})


class Streamed(StreamingResponse):
    """A streaming response that ends, and closes its iterator, if the client stops reading.

    usage: what the response has cost, once it has been sent; None: its body says it.
    """

    usage: Callable[[], dict[str, Any]] | None = None

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_AFTER_S):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            log.warning("client_stalled silent_s=%.0f", STALLED_AFTER_S)
        finally:
            if isinstance(self.body_iterator, AsyncGenerator):
                await self.body_iterator.aclose()


async def first_of(pieces: AsyncGenerator[Result, None]) -> Result | None:
    """The first piece, or None if there is none. An error or cancellation closes the iterator."""
    try:
        return await anext(pieces, None)
    except BaseException:
        await pieces.aclose()
        raise


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
