"""Runs a line of a batch as an HTTP request of its key, without a connection.

In: the body of a line. Out: status and body of the response that a client would get.
The routes are those of clients, so checks, limits of sizes, names and cache salts are the same.
Every line is a flex request, whatever its body says. Lines wait for no place, because the runner
decides how many there are, and count for no limit of responses per minute.
"""

import asyncio
import binascii
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any

import orjson
import pybase64
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import encode_base64
from sglang_live.gateway.errors import ClientEventError, cut, error_response
from sglang_live.gateway.flex.gate import FlexGate
from sglang_live.gateway.flex.tier import FLEX, HEADER
from sglang_live.gateway.http.body import Streamed, read_body
from sglang_live.gateway.http.chat import ChatRoute
from sglang_live.gateway.http.speech import SpeechRoute
from sglang_live.gateway.http.transcription import TranscriptionRoute
from sglang_live.gateway.json_forms import broken_json
from sglang_live.gateway.native.request_check import OF_USE_UNTIL
from sglang_live.gateway.parts import Endpoint, GatewayParts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SPEECH, TRANSCRIPTIONS = "/v1/audio/speech", "/v1/audio/transcriptions"
_FIELD = re.compile(r"[A-Za-z0-9_\[\]]{1,64}")
_DEFAULT_FORMAT = "mp3"  # of speech


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    body: of the response, as JSON. For speech {"audio": base64, "format": name, "usage": …}.
    code: of the error; "" if there is none.
    retry_after_s: None: the response names no time.
    """

    status: int
    body: Any
    code: str = ""
    retry_after_s: float | None = None

    @property
    def succeeded(self) -> bool:
        return self.status == 200


class InProcess:
    """endpoints: by path, those that the server really serves."""

    def __init__(self, endpoints: Mapping[str, Endpoint]):
        self.endpoints = dict(endpoints)

    async def __call__(self, key: str, path: str, body: bytes, until_s: int) -> Outcome:
        """
        key: "" on a server without keys.
        until_s: Unix time at which the batch expires.
        """
        speech_format = ""
        try:
            content_type, data, speech_format = _request(path, body)
            request = _as_request(key, path, content_type, data)
            request.scope[OF_USE_UNTIL] = until_s
            response = await self.endpoints[path](request)
            status, headers, content = await _sent(response, request)
            if isinstance(response, Streamed) and response.usage:
                speech = {"format": speech_format, "usage": response.usage()}
                return Outcome(status, {"audio": encode_base64(content), **speech})
        except LiveError as error:  # one that comes after the first byte of a response
            sent = error_response(error)
            status, headers, content = error.http_status, sent.headers, bytes(sent.body)
        return _outcome(status, headers, content)


def line_endpoints(parts: GatewayParts, flex: FlexGate) -> dict[str, Endpoint]:
    """The routes of clients that lines may name, by path: those that the model of the server has.

    Without SGLang's own API, chats are turns, and there are no completions.

    flex: bound on lines.
    """
    lines, proxy = copy(parts), parts.proxy
    lines.flex = flex
    endpoints: dict[str, Endpoint] = {SPEECH: SpeechRoute(lines).__call__}
    if not parts.config.model.has_language_model:
        return endpoints
    endpoints[TRANSCRIPTIONS] = TranscriptionRoute(lines).__call__
    pass_on = partial(proxy.pass_on, counted=False, flex=flex) if proxy else None
    endpoints[CHAT] = ChatRoute(lines, pass_on).__call__
    if pass_on:

        async def complete(request: Request) -> Response:
            return await pass_on(
                request, await read_body(request, parts.config.inputs.max_body_bytes)
            )

        endpoints[COMPLETIONS] = complete
    return endpoints


def _request(path: str, body: bytes) -> tuple[str, bytes, str]:
    """Content type and data of the request, and the format of its speech.

    Raises:
        ClientEventError: the body cannot be one of a batch.
    """
    try:
        form = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise broken_json(body, error) from None
    for name in ("stream", "stream_format"):
        if form.get(name) not in (None, False, "audio"):
            raise ClientEventError(
                f"A request of a batch has no stream: leave out '{name}'.",
                code="unsupported_parameter",
                param=name,
            )
    if "rid" in form:  # requests of a key that it names run one at a time
        raise ClientEventError("Unknown parameter: 'rid'.", code="unknown_parameter", param="rid")
    if path == TRANSCRIPTIONS:
        return *_multipart(form), ""
    return "application/json", body, str(form.get("response_format") or _DEFAULT_FORMAT)


def _multipart(form: dict[str, Any]) -> tuple[str, bytes]:
    """Content type and data of a form. Its file is base64 in the body of the line."""
    boundary, parts = token_hex(16), []
    for name, value in form.items():
        if not _FIELD.fullmatch(name):
            raise ClientEventError(
                f"Unknown parameter: {cut(name)!r}.", code="unknown_parameter", param=name
            )
        head = f'content-disposition: form-data; name="{name}"'
        if name == "file":
            head, data = f'{head}; filename="audio"', _file(value)
        elif isinstance(value, str):
            data = value.encode()
        elif isinstance(value, bool | int | float):
            data = orjson.dumps(value)
        elif value is None:
            continue
        else:
            raise ClientEventError(f"'{name}' must be text.", param=name)
        parts.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + data + b"\r\n")
    end = f"--{boundary}--\r\n".encode()
    return f"multipart/form-data; boundary={boundary}", b"".join(parts) + end


def _file(value: object) -> bytes:
    try:
        if isinstance(value, str):
            return pybase64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise ClientEventError("'file' must be a sound file in base64.", param="file")


def _as_request(key: str, path: str, content_type: str, data: bytes) -> Request:
    headers = [(b"content-type", content_type.encode()), (HEADER.encode(), FLEX.encode())]
    if key:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "headers": headers,
    }
    unread = [data]

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # no client that could leave
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    return Request(scope, receive)


async def _sent(response: Response, request: Request) -> tuple[int, Headers, bytes]:
    """Status, headers and body of a response that is complete."""
    status, headers, pieces = 0, Headers(), []

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], Headers(raw=list(message["headers"]))
        elif message["type"] == "http.response.body":
            pieces.append(bytes(message.get("body", b"")))

    await response(request.scope, request.receive, send)
    if isinstance(response, Streamed) and response.error is not None:
        raise response.error
    return status, headers, b"".join(pieces)


def _outcome(status: int, headers: Mapping[str, str], content: bytes) -> Outcome:
    kind = headers.get("content-type", "").partition(";")[0]
    code = ""
    body: Any
    if kind == "application/json":
        body = orjson.loads(content)
        if status != 200:
            error = body.get("error") if isinstance(body, dict) else None
            code = str(error.get("code") or "") if isinstance(error, dict) else ""
    else:
        body = content.decode()
    wait = headers.get("retry-after", "")
    return Outcome(status, body, code, float(wait) if wait.isdigit() else None)
