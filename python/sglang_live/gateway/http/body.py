"""Bounded request bodies, and clients that leave or stop reading."""

import asyncio
import codecs
import logging
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote_to_bytes

import orjson
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Send

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.errors import ClientEventError, cut, error_body
from sglang_live.gateway.json_forms import decoder_of, read_form
from sglang_live.settings import Count, Positive, Settings
from sglang_live.sound.decoder import MAX_CLIP_S

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Form = TypeVar("Form")

_MIB = 1024 * 1024
# For the WebSocket server (uvicorn's ws_max_size). 15 MiB of audio are 20 MiB of base64 plus an
# envelope; with the margin, somewhat larger appends get an error instead of a closed socket.
MAX_FRAME_BYTES = 24 * _MIB
# RFC 8187: charset'language'name, percent-encoded.
_EXTENDED_NAME = re.compile(
    rb";\s*filename\*\s*=\s*\"?(?P<charset>[\w-]+)'[^']*'(?P<name>[^;\"\s]*)", re.IGNORECASE
)
_NOT_IN_NAMES = re.compile(r'[\x00-\x1f"\\]')
# A client that reads nothing for 60 s has abandoned the response; a paused player still fills its
# buffer.
STALLED_AFTER_S = 60.0
# The largest body takes 600 s at 1 Mbit/s.
BODY_PAUSE_S, BODY_S = 20.0, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLimits(Settings):
    """
    max_body_bytes: body of one HTTP request.
    max_frame_bytes: one event of a session, as text.
    max_append_bytes: audio in one event, or a picture, decoded from base64.
    max_input_audio_s: seconds of uncommitted audio; with voice detection, of one turn.
    """

    max_body_bytes: Count = 64 * _MIB
    max_frame_bytes: Count = MAX_FRAME_BYTES
    max_append_bytes: Count = 15 * _MIB
    max_input_audio_s: Positive = MAX_CLIP_S

    def check(self) -> None:
        if self.max_frame_bytes < self.max_append_bytes * 4 // 3:
            raise BadInputError("max_frame_bytes must hold max_append_bytes in base64")


class BodyTooLargeError(BadInputError):
    code = "request_too_large"
    http_status = 413


class BodyTooSlowError(BadInputError):
    code = "request_timeout"
    http_status = 408


class EncodedBodyError(BadInputError):
    code = "unsupported_content_encoding"
    http_status = 415
    headers: ClassVar[Mapping[str, str]] = {"Accept-Encoding": "identity"}  # RFC 9110, 15.5.16
    param = "Content-Encoding"

    def __init__(self, encoding: str):
        super().__init__(
            f"Content-Encoding {cut(encoding)!r} is not supported, only: identity. Send the body "
            "as it is."
        )


def bounded(request: Request, max_bytes: int) -> Request:
    """The same request with a bounded body.

    Reading it raises BodyTooLargeError as soon as the body exceeds max_bytes, and BodyTooSlowError
    if no byte arrives for BODY_PAUSE_S or the whole body has not arrived after BODY_S.

    Raises:
        EncodedBodyError: the body is compressed.
    """
    for encoding in ",".join(request.headers.getlist("content-encoding")).split(","):
        if encoding.strip().lower() not in ("", "identity"):
            raise EncodedBodyError(encoding.strip())
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
    """The body, without a mark of UTF-8 at its beginning.

    Raises:
        BodyTooLargeError: the body exceeds max_bytes; its rest is not read.
        BodyTooSlowError: the body does not arrive in time.
        EncodedBodyError: the body is compressed.
        ClientDisconnect: the client left.
    """
    # Some editors and libraries write a mark of UTF-8 before JSON.
    return (await bounded(request, max_bytes).body()).removeprefix(codecs.BOM_UTF8)


@asynccontextmanager
async def multipart(
    request: Request, max_bytes: int, *, max_fields: int, file: str = "file"
) -> AsyncGenerator[FormData, None]:
    """A multipart form with at most one file. Files of any length are on disk, until the end.

    file: its field.
    Raises:
        BadInputError: see read_body, or the form is malformed.
        OSError: the folder for temporary files is full.
    """
    body = bounded(request, max_bytes)
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise ClientEventError(
            f"There is no {file!r}: the Content-Type must be multipart/form-data, with a boundary.",
            code="missing_required_parameter",
            param=file,
        )
    parser = _FormParser(request.headers, body.stream(), max_files=1, max_fields=max_fields)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise BadInputError(f"Invalid form: {error.message}") from None
    try:
        yield form
    finally:
        await form.close()


class _FormParser(MultiPartParser):
    """Starlette's, which takes a part for a file only if it has a plain `filename`."""

    def on_headers_finished(self) -> None:
        written = self._current_part.content_disposition or b""
        if found := _EXTENDED_NAME.search(written):
            charset = "latin-1" if found["charset"].lower() == b"iso-8859-1" else "utf-8"
            name = unquote_to_bytes(found["name"]).decode(charset, "replace")
            plain = _NOT_IN_NAMES.sub("_", name).encode()
            self._current_part.content_disposition = written + b'; filename="' + plain + b'"'
        super().on_headers_finished()


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
    result, gone = asyncio.create_task(work), asyncio.create_task(until_left(request.receive))
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

    After an error the response stays incomplete, which tells the client of it: its status was sent
    long before.

    usage: what the response has cost, once it has been sent; None: its body says it.
    error: that ended the response; None: it is complete, or its client has left.
    """

    usage: Callable[[], dict[str, Any]] | None = None
    error: LiveError | None = None

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_AFTER_S):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            log.warning("client_stalled silent_s=%.0f", STALLED_AFTER_S)
        except LiveError as error:
            self.error = error
            log.warning("response_cut code=%s: %s", error.code, error)
        finally:
            if isinstance(self.body_iterator, AsyncGenerator):
                await self.body_iterator.aclose()


def server_sent(fields: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(fields) + b"\n\n"


async def with_error_event(
    events: AsyncGenerator[bytes, None], what: str, **head: str
) -> AsyncGenerator[bytes, None]:
    """The events, and an error as the last of them: the HTTP status has already been sent."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except LiveError as error:
            log.warning("%s_failed code=%s: %s", what, error.code, error)
            yield server_sent({**head, "error": error_body(error)})


async def begun(
    request: Request, pieces: AsyncGenerator[Result, None]
) -> tuple[Result | None, AsyncGenerator[Result, None]]:
    """Wait for the first piece, or the end: a failure before it has an HTTP status.

    Returns:
        The first piece, None if there is none; and all of them.
    """
    first = await while_connected(request, _first_of(pieces))
    return first, _all_of(first, pieces)


async def _first_of(pieces: AsyncGenerator[Result, None]) -> Result | None:
    """An error or cancellation closes the iterator."""
    try:
        return await anext(pieces, None)
    except BaseException:
        await pieces.aclose()
        raise


async def _all_of(
    first: Result | None, rest: AsyncGenerator[Result, None]
) -> AsyncGenerator[Result, None]:
    async with aclosing(rest):
        if first is not None:
            yield first
        async for piece in rest:
            yield piece


async def until_left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
