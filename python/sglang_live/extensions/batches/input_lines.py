"""Reader of input files: one request in each line, as OpenAI's Batch API has it.

In: a file of a client. Out: where its lines are, or all that is wrong with it. Bodies are not read
here: what is wrong with a body is the result of its line.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from sglang_live.errors import ModelNotFoundError
from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.records import Fault, Line
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import Strict, decoder_of, read_form

MAX_CUSTOM_ID = 512
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some editors write
# The event loop gets the interpreter between two groups of lines.
_GROUP, _PAUSE_S = 64, 0.001


class InputLine(Strict):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    model: str | None = None


@dataclass(slots=True)
class CheckedInput:
    """faults: what is wrong; the first ones, if there are many. lines: complete without faults."""

    lines: list[Line] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def check_input(
    path: Path, endpoint: str, check_model: Callable[[str | None], None], config: BatchConfig
) -> CheckedInput:
    """Takes seconds for a large file; runs in a thread of its own.

    check_model: raises ModelNotFoundError.
    """
    checked = CheckedInput()
    n_of_id: dict[str, int] = {}
    with path.open("rb") as file:
        for n, at, text in _texts(file, config.max_line_bytes):
            if n % _GROUP == 0:
                time.sleep(_PAUSE_S)
            if len(checked.lines) == config.max_lines:
                message = f"The file has more than {config.max_lines} requests."
                checked.faults.append(Fault(code="too_many_requests", message=message, n_line=n))
                break
            try:
                custom_id = _check(text, endpoint, check_model, config)
                if custom_id in n_of_id:
                    raise ClientEventError(
                        f"The custom_id {cut(custom_id)!r} is a duplicate of that of line "
                        f"{n_of_id[custom_id]}. It must be unique in a batch.",
                        code="duplicate_custom_id",
                        param="custom_id",
                    )
            except ClientEventError as error:
                checked.faults.append(
                    Fault(code=error.code, message=str(error), n_line=n, param=error.param)
                )
                if len(checked.faults) == config.max_faults:
                    break
            else:
                n_of_id[custom_id] = n
                checked.lines.append(Line(n=n, custom_id=custom_id, at=at, n_bytes=len(text)))
    if not checked.lines and not checked.faults:
        checked.faults.append(Fault(code="empty_file", message="The input file has no requests."))
    return checked


def body_of(text: bytes) -> bytes:
    """The body of a line that was checked."""
    return bytes(decoder_of(InputLine).decode(text).body)


def _texts(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, position and text of each line that is not blank; of a long one its beginning."""
    n, at = 0, 0
    if file.read(len(_MARK)) == _MARK:
        at = len(_MARK)
    file.seek(at)
    while text := file.readline(max_bytes + 1):
        n += 1
        if text.strip():
            yield n, at, text
        at += len(text)
        while text and not text.endswith(b"\n"):  # the rest of a long line
            text = file.readline(max_bytes)
            at += len(text)


def _check(
    text: bytes, endpoint: str, check_model: Callable[[str | None], None], config: BatchConfig
) -> str:
    """The custom_id of a line. Raises ClientEventError."""
    if len(text) > config.max_line_bytes:
        raise ClientEventError(
            f"The line has more than {config.max_line_bytes} bytes.", code="line_too_large"
        )
    try:
        line = read_form(text, decoder_of(InputLine))
    except ClientEventError as error:
        if error.code == "invalid_json":
            raise ClientEventError(
                f"This line is not parseable as valid JSON: {error}", code="invalid_json_line"
            ) from None
        raise
    if not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID:
        raise ClientEventError(
            f"custom_id must have 1 to {MAX_CUSTOM_ID} characters.", param="custom_id"
        )
    if line.method != "POST":
        raise ClientEventError(
            f"method must be POST, got {cut(line.method)!r}.", code="invalid_method", param="method"
        )
    if line.url != endpoint:
        raise ClientEventError(
            f"url must be the batch's endpoint {endpoint}, got {cut(line.url)!r}.",
            code="invalid_url",
            param="url",
        )
    _check_body(line.body, check_model)
    return line.custom_id


def _check_body(body: msgspec.Raw, check_model: Callable[[str | None], None]) -> None:
    if memoryview(body)[0] != ord("{"):
        raise ClientEventError("body must be an object.", code="invalid_type", param="body")
    try:
        named = decoder_of(_Named).decode(body)
    except msgspec.ValidationError:
        raise ClientEventError(
            "body.model must be text.", code="invalid_type", param="body.model"
        ) from None
    try:
        check_model(named.model)
    except ModelNotFoundError as error:
        raise ClientEventError(str(error), code=error.code, param="body.model") from None
