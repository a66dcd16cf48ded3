"""Request bodies, bounded and read; clients that leave or stop reading before an answer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from sglang_live.errors import BadInputError
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import decoder_of, read_form

log = logging.getLogger(__name__)

Made = TypeVar("Made")
Form = TypeVar("Form")

# Whoever takes nothing for so long has let the answer down; a player that is paused is buffered.
STALLED_AFTER_S = 60.0
# The largest body takes so long at 1 Mbit/s.
BODY_PAUSE_S, BODY_S = 20.0, 600.0


class BodyTooLargeError(BadInputError):
    code = "request_too_large"
    http_status = 413


class BodyTooSlowError(BadInputError):
    code = "request_timeout"
    http_status = 408


def bounded(request: Request, max_bytes: int) -> Request:
    """The same request.

    Reading it raises BodyTooLargeError as soon as its body is longer, and BodyTooSlowError when
    nothing of it comes for BODY_PAUSE_S, or when all of it has not come within BODY_S.
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
            raise BodyTooSlowError("The body of the request does not come.") from None
        n_bytes += len(message.get("body", b""))
        if n_bytes > max_bytes:
            raise BodyTooLargeError(f"The body may have at most {max_bytes} bytes.")
        return message

    return Request(request.scope, receive)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """
    Raises:
        BodyTooLargeError: as soon as it is, before the rest has come.
        ClientDisconnect: the client left.
    """
    return await bounded(request, max_bytes).body()


def refuse_query(request: Request) -> None:
    """Raises ClientEventError: a parameter stands in the URL, where none is read."""
    for name in request.query_params:
        raise ClientEventError(
            f"Unknown parameter in the URL: {cut(name)!r}. Parameters stand in the body.",
            code="unknown_parameter",
            param=name,
        )


def read_json(body: bytes, form: type[Form]) -> Form:
    """Raises BadInputError that says where the body is wrong."""
    try:
        return read_form(body, decoder_of(form))
    except ClientEventError as error:
        if error.code == "invalid_event":  # there are none over HTTP
            error.code = BadInputError.code
        raise


async def while_connected(request: Request, making: Coroutine[Any, Any, Made]) -> Made:
    """The result, unless its client leaves before there is one: then it is cancelled.

    Args:
        request: whose body was read.
    Raises:
        ClientDisconnect: the client left.
    """
    made, gone = asyncio.create_task(making), asyncio.create_task(_until_disconnect(request))
    try:
        await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            raise ClientDisconnect
        return made.result()
    finally:
        gone.cancel()
        made.cancel()
        await asyncio.wait({made, gone})


class Streamed(StreamingResponse):
    """Ends when its client takes nothing of it for a while, and its pieces' iterator with it."""

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_AFTER_S):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            log.warning("client_stalled: took nothing for %.0f s", STALLED_AFTER_S)
        finally:
            if isinstance(self.body_iterator, AsyncGenerator):
                await self.body_iterator.aclose()


async def first_of(pieces: AsyncGenerator[Made, None]) -> Made | None:
    """The first piece; None: there is none. Leaving before it has come closes the iterator."""
    try:
        return await anext(pieces, None)
    except BaseException:
        await pieces.aclose()
        raise


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
