"""Request bodies of bounded size, and clients that leave before they are answered."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from sglang_live.errors import BadInputError

Made = TypeVar("Made")


class BodyTooLargeError(BadInputError):
    code = "request_too_large"
    http_status = 413


def bounded(request: Request, max_bytes: int) -> Request:
    """The same request. Reading it raises BodyTooLargeError as soon as its body is longer."""
    n_bytes = 0

    async def receive() -> Message:
        nonlocal n_bytes
        message = await request.receive()
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
