"""The operator's own text model for delegated work: a URL that speaks OpenAI's HTTP API.

In: a task. Out: its text as it comes, then the result. The Responses API, or chat completions, as
the URL ends. Of a client it gets the conversation, the settings of its work and the items that it
adds, never its key. What that server says of its errors stays unread: it may name secrets.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from sglang_live.core import Usage
from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.live.work import Item, Task, Worked
from sglang_live.settings import Positive, Settings, flag

_RESPONSES, _CHAT = "/responses", "/chat/completions"
_CONNECT_S = 5.0
# Of one response: far more than is ever spoken.
_MOST_BYTES = 4 << 20
_MOST_CALLS = 64

Form = TypeVar("Form")


class TextServerError(LiveError):
    http_status = 502

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class TextServerConfig(Settings):
    live_backend: str | None = flag(
        None,
        "text model for what Live sessions delegate: URL of an OpenAI-compatible .../responses or "
        ".../chat/completions",
        value="URL",
        unset="the served model",
    )
    live_backend_model: str = flag(
        "",
        "its name there",
        value="NAME",
        unset="the one that the client gives",
    )
    live_backend_key: str | None = flag(
        None,
        "key for it",
        value="KEY",
        env="SGLANG_LIVE_BACKEND_KEY",
    )
    live_backend_timeout_s: Positive = flag(60.0, "longest response of it")

    def check(self) -> None:
        if self.live_backend is None:
            return
        parts = urlsplit(self.live_backend)
        known = parts.path.endswith((_RESPONSES, _CHAT))
        if parts.scheme not in ("http", "https") or not parts.hostname or not known:
            raise BadInputError(
                f"live-backend: an http or https URL that ends with {_RESPONSES} or {_CHAT}"
            )
        if (key := self.live_backend_key) and not (key.isascii() and key.isprintable()):
            raise BadInputError("live-backend-key: a header cannot hold it")


class TextServer:
    """A TextModel (work.py)."""

    def __init__(self, config: TextServerConfig):
        assert config.live_backend is not None
        self._config = config
        self._url = config.live_backend
        self._is_chat = urlsplit(config.live_backend).path.endswith(_CHAT)

    async def work(self, task: Task) -> AsyncGenerator[str | Worked, None]:
        """
        Raises:
            TextServerError: it cannot be reached, refuses, is too slow, or its answer is no answer
                or too long.
        """
        read = _read_chat if self._is_chat else _read_response
        body = _chat(task) if self._is_chat else _response(task)
        body["model"] = self._config.live_backend_model or task.settings.model
        try:
            async with (
                asyncio.timeout(self._config.live_backend_timeout_s),
                self._open(body) as answer,
            ):
                _check(answer)
                async for piece in read(_events(answer)):
                    yield piece
        except TimeoutError as error:
            raise TextServerError(
                f"The text model took more than {self._config.live_backend_timeout_s:g} s.",
                "backend_timeout",
            ) from error
        except aiohttp.ClientError as error:
            raise TextServerError(
                "The text model cannot be reached.", "backend_unavailable"
            ) from error

    def _open(self, body: dict[str, Any]) -> "_Request":
        key = self._config.live_backend_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return _Request(self._url, body, {**headers, "accept": "text/event-stream"})


class _Request:
    """A request with a connection of its own: the context of its response."""

    def __init__(self, url: str, body: dict[str, Any], headers: dict[str, str]):
        self._request = url, body, headers

    async def __aenter__(self) -> aiohttp.ClientResponse:
        url, body, headers = self._request
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(timeout=timeout)
        try:
            return await self._session.post(url, json=body, headers=headers, allow_redirects=False)
        except BaseException:
            await self._session.close()
            raise

    async def __aexit__(self, *_exc: object) -> None:
        await self._session.close()


def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status in (401, 403):
        raise TextServerError("The text model refuses this server's key.", "backend_refused")
    if answer.status == 429 or answer.status >= 500:
        raise TextServerError(f"The text model answers {answer.status}.", "backend_unavailable")
    if answer.status != 200:
        raise TextServerError(f"The text model answers {answer.status}.", "backend_refused")
    if answer.content_type != "text/event-stream":
        raise _malformed("is no event stream")


def _malformed(what: str) -> TextServerError:
    return TextServerError(f"The answer of the text model {what}.", "backend_malformed")


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events, each on one line."""
    buffer, n_bytes = b"", 0
    async for piece in answer.content.iter_any():
        n_bytes += len(piece)
        if n_bytes > _MOST_BYTES:
            raise TextServerError("The text model answers too much.", "backend_oversized")
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                yield data


def _decoded(data: bytes, form: type[Form]) -> Form:
    try:
        return msgspec.json.decode(data, type=form)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise _malformed("is malformed") from None


def _call(name: str, arguments: str) -> str:
    """A call as a model writes it; gateway/tools.py checks it."""
    return json.dumps({"name": name, "arguments": arguments or "{}"})


# --- the Responses API ---


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _ResponseUsage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None


class _Snapshot(msgspec.Struct):
    usage: _ResponseUsage | None = None


class _OutputItem(msgspec.Struct):
    type: str = ""
    name: str = ""
    arguments: str = ""


class _ResponseEvent(msgspec.Struct):
    type: str
    delta: str | None = None
    item: _OutputItem | None = None
    response: _Snapshot | None = None


def _response(task: Task) -> dict[str, Any]:
    settings = task.settings
    body: dict[str, Any] = {
        "instructions": task.instructions,
        "input": [*task.conversation, *task.items],
        "stream": True,
        "store": False,
    }
    if settings.tools:
        # Schemas need not be as strict ones have to be; every call is checked here.
        body["tools"] = [{**tool, "strict": False} for tool in settings.tools]
        body["tool_choice"] = settings.tool_choice
        body["parallel_tool_calls"] = settings.parallel_tool_calls
    if settings.max_output_tokens is not None:
        body["max_output_tokens"] = settings.max_output_tokens
    return body


async def _read_response(events: AsyncIterator[bytes]) -> AsyncIterator[str | Worked]:
    calls: list[str] = []
    async for data in events:
        event = _decoded(data, _ResponseEvent)
        match event.type:
            case "response.output_text.delta" | "response.refusal.delta" if event.delta:
                yield event.delta
            case "response.output_item.done" if event.item and event.item.type == "function_call":
                calls.append(_call(event.item.name, event.item.arguments))
                _check_number(calls)
            case "response.completed" | "response.incomplete":
                used = (event.response and event.response.usage) or _ResponseUsage()
                cached = used.input_tokens_details or _Details()
                usage = _usage(used.input_tokens, used.output_tokens, cached)
                yield Worked(tuple(calls), usage, event.type == "response.incomplete")
                return
            case "response.failed" | "error":
                raise TextServerError("The text model has failed.", "backend_failed")
    raise _malformed("has no end")


# --- chat completions ---


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _ChatUsage | None = None
    error: Any = None


@dataclass(slots=True)
class _WrittenCall:
    name: str = ""
    arguments: list[str] = field(default_factory=list)


def _chat(task: Task) -> dict[str, Any]:
    settings = task.settings
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": task.instructions},
            *_messages((*task.conversation, *task.items)),
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.tools:
        body["tools"] = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in settings.tools
        ]
        choice = settings.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        body["tool_choice"] = choice
        body["parallel_tool_calls"] = settings.parallel_tool_calls
    if settings.max_output_tokens is not None:
        body["max_tokens"] = settings.max_output_tokens
    return body


def _messages(items: tuple[Item, ...]) -> list[dict[str, Any]]:
    """Chat messages; calls of one response are one message."""
    messages: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "function_call":
            if not calls:
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
            continue
        calls = []
        if item["type"] == "function_call_output":
            output = {"tool_call_id": item["call_id"], "content": item["output"]}
            messages.append({"role": "tool", **output})
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": item["content"]})
    return messages


async def _read_chat(events: AsyncIterator[bytes]) -> AsyncIterator[str | Worked]:
    calls: dict[int, _WrittenCall] = {}
    finish, used = None, _ChatUsage()
    async for data in events:
        chunk = _decoded(data, _Chunk)
        if chunk.error is not None:
            raise TextServerError("The text model has failed.", "backend_failed")
        used = chunk.usage or used
        for choice in chunk.choices[:1]:
            if text := choice.delta.content or choice.delta.refusal:
                yield text
            for delta in choice.delta.tool_calls or ():
                call = calls.setdefault(delta.index, _WrittenCall())
                _check_number(calls)
                if delta.function is not None:
                    call.name += delta.function.name or ""
                    call.arguments.append(delta.function.arguments or "")
            finish = choice.finish_reason or finish
    if finish is None:
        raise _malformed("has no end")
    written = tuple(_call(call.name, "".join(call.arguments)) for call in calls.values())
    cached = used.prompt_tokens_details or _Details()
    usage = _usage(used.prompt_tokens, used.completion_tokens, cached)
    yield Worked(written, usage, finish == "length")


def _usage(n_read: int, n_written: int, cached: _Details) -> Usage:
    return Usage(
        input_text_tokens=n_read, output_text_tokens=n_written, cached_tokens=cached.cached_tokens
    )


def _check_number(calls: "list[str] | dict[int, _WrittenCall]") -> None:
    if len(calls) > _MOST_CALLS:
        raise TextServerError("The text model makes too many calls.", "backend_oversized")
