"""POST /v1/chat/completions: spoken answers; written ones are SGLang's own, where it is near.

In: OpenAI's JSON. Out: a completion with audio and transcript, whole or in chunks.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.core import (
    AudioDelta,
    PromptContent,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
    Usage,
)
from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import encode_base64
from sglang_live.gateway.audio.files import FORMATS
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.errors import error_body, error_response
from sglang_live.gateway.http.body import (
    Streamed,
    first_of,
    read_body,
    refuse_query,
    while_connected,
)
from sglang_live.gateway.http.chat_history import history_of
from sglang_live.gateway.http.chat_schema import ChatForm, read_chat
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.model import brief_session, check_model, voice_of
from sglang_live.gateway.owner import owner_salt
from sglang_live.gateway.realtime.context_limit import ContextLimit
from sglang_live.gateway.realtime.conversation.item_schema import check_text
from sglang_live.gateway.tools import MalformedCallError, read_function_call, tools_of
from sglang_live.orchestrator.session import Orchestrator
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# For how long, and how many, answers can be referred to by their audio id.
_KEPT_S = 3600
_MOST_KEPT = 1000


@dataclass
class _SaidBefore:
    """Transcripts of answers by audio id; the oldest are forgotten."""

    _texts: OrderedDict[str, tuple[float, str]] = field(default_factory=OrderedDict)

    def keep(self, audio_id: str, text: str) -> int:
        """Returns when it is forgotten, in seconds since 1970."""
        until_s = time.time() + _KEPT_S
        self._texts[audio_id] = (until_s, text)
        while len(self._texts) > _MOST_KEPT:
            self._texts.popitem(last=False)
        return int(until_s)

    def texts(self) -> dict[str, str]:
        now_s = time.time()
        while self._texts and next(iter(self._texts.values()))[0] < now_s:
            self._texts.popitem(last=False)
        return {audio_id: text for audio_id, (_, text) in self._texts.items()}


class ChatRoute:
    """
    written: takes requests that ask for text alone, with their body; None: nobody does.
    owner: of a request (Keys.owner).
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        written: Callable[[Request, bytes], Awaitable[Response]] | None,
        owner: Callable[[Headers], str],
    ):
        self._orchestrator, self._config, self._metrics = orchestrator, config, metrics
        self._written, self._owner = written, owner
        self._said_before = _SaidBefore()
        self._context_limit = ContextLimit(orchestrator, metrics)

    async def __call__(self, request: Request) -> Response:
        try:
            body = await read_body(request, self._config.max_body_bytes)
            if self._written and not _wants_audio(body):
                return await self._written(request, body)
            refuse_query(request)
            form = read_chat(body)
            salt = owner_salt(self._owner(request.headers))
            turn = await asyncio.to_thread(self._turn, form, salt)
            await self._check_context(turn)
            answer = _Answer(form, self._orchestrator.model_name)
            events = self._events(turn)
            if form.stream:
                first = await while_connected(request, first_of(events))
                chunks = self._chunks(answer, first, events)
                return Streamed(_with_errors(chunks), media_type="text/event-stream")
            await while_connected(request, answer.take_all(events))
            calls = self._calls(answer)
            file = await asyncio.to_thread(answer.file)  # a minute of mp3 takes half a second
            return JSONResponse(self._whole(answer, file, calls))
        except LiveError as error:
            return error_response(error)

    def _turn(self, form: ChatForm, salt: str) -> TurnRequest:
        check_model(self._orchestrator, form.model)
        instructions, history = history_of(
            form.messages, self._said_before.texts(), max_audio_s=self._config.max_input_audio_s
        )
        return TurnRequest(
            instructions=instructions or self._config.default_instructions,
            history=history,
            voice=voice_of(self._orchestrator.voices, form.voice),
            wants_audio=form.wants_audio,
            max_output_tokens=form.limit,
            temperature=form.temperature,
            seed=form.seed,
            stateless=True,
            tools=tools_of(form.functions_of(), form.choice()),
            cache_salt=salt,
        )

    async def _check_context(self, turn: TurnRequest) -> None:
        """Raises ClientEventError: it cannot fit, or is more text than is worth a look."""
        functions = turn.tools.functions
        content = PromptContent.of(turn.history, turn.instructions, functions)
        check_text(content.n_characters + len(content.instructions), "messages")
        header_at = "tools" if functions else "messages"
        await self._context_limit.check(content, header_at=header_at, items_at="messages")

    async def _events(self, turn: TurnRequest) -> AsyncIterator[TurnEvent]:
        async with (
            brief_session(self._orchestrator, new_id("chat")) as session,
            aclosing(session.respond(turn)) as events,
        ):
            async for event in events:
                yield event

    def _whole(self, answer: "_Answer", file: bytes, calls: list) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        if not answer.form.wants_audio:
            message["content"] = answer.text
        elif answer.pcm:
            message["audio"] = {
                "id": answer.audio_id,
                "data": encode_base64(file),
                "transcript": answer.text,
                "expires_at": self._said_before.keep(answer.audio_id, answer.text),
            }
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": answer.finish_reason(calls),
            "logprobs": None,
        }
        return answer.object("chat.completion", [choice], usage=_usage(answer.done.usage))

    async def _chunks(
        self, answer: "_Answer", first: TurnEvent, events: AsyncIterator[TurnEvent]
    ) -> AsyncIterator[bytes]:
        async with aclosing(events):
            yield answer.chunk({"role": "assistant", "content": None})
            event: TurnEvent | None = first
            while event is not None:
                answer.take(event)
                match event:
                    case TranscriptDelta() if event.text and not answer.form.wants_audio:
                        yield answer.chunk({"content": event.text})
                    case TranscriptDelta() if event.text:
                        audio = {"id": answer.audio_id, "transcript": event.text}
                        yield answer.chunk({"audio": audio})
                    case AudioDelta():
                        audio = {"id": answer.audio_id, "data": encode_base64(event.pcm)}
                        yield answer.chunk({"audio": audio})
                event = await anext(events, None)
        if answer.pcm:
            until = self._said_before.keep(answer.audio_id, answer.text)
            yield answer.chunk({"audio": {"id": answer.audio_id, "expires_at": until}})
        calls = self._calls(answer)
        if calls:
            indexed = [{"index": n, **call} for n, call in enumerate(calls)]
            yield answer.chunk({"tool_calls": indexed})
        yield answer.chunk({}, answer.finish_reason(calls))
        if answer.form.stream_options and answer.form.stream_options.include_usage:
            usage = _usage(answer.done.usage)
            yield _event(answer.object("chat.completion.chunk", [], usage=usage))
        yield b"data: [DONE]\n\n"

    def _calls(self, answer: "_Answer") -> list[dict[str, Any]]:
        """Raises MalformedCallError: the answer is a call that is none, and nothing else."""
        calls, tools, fault = [], answer.form.functions_of(), None
        for text in answer.done.function_calls:
            try:
                call = read_function_call(text, tools)
            except MalformedCallError as error:
                log.warning("tool_call_malformed completion=%s: %r", answer.id, str(error))
                self._metrics.tool_calls.labels("malformed").inc()
                fault = error
                continue
            if len(calls) == answer.form.max_calls:
                self._metrics.tool_calls.labels("surplus").inc()
                continue
            self._metrics.tool_calls.labels("made").inc()
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": new_id("call"), "type": "function", "function": function})
        if fault and not calls and not answer.text and not answer.pcm:
            raise fault
        return calls


class _Answer:
    """What was made so far of one completion."""

    def __init__(self, form: ChatForm, model: str):
        self.form, self.model = form, model
        self.id, self.audio_id = new_id("chatcmpl"), new_id("audio")
        self.created_s = int(time.time())
        self.text = ""
        self.pcm: list[bytes] = []
        self.done: TurnDone | None = None

    def file(self) -> bytes:
        if not self.pcm:
            return b""
        name = self.form.audio.format if self.form.audio else "wav"
        _, encoder = FORMATS["pcm" if name == "pcm16" else name]
        file = encoder()
        return file.push(b"".join(self.pcm)) + file.finish()

    async def take_all(self, events: AsyncIterator[TurnEvent]) -> None:
        async with aclosing(events):
            async for event in events:
                self.take(event)

    def take(self, event: TurnEvent) -> None:
        match event:
            case TranscriptDelta():
                self.text += event.text
            case AudioDelta():
                self.pcm.append(event.pcm)
            case TurnDone():
                self.done = event

    def finish_reason(self, calls: list) -> str:
        if calls:
            return "tool_calls"
        return "length" if self.done.status == "incomplete" else "stop"

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return _event(self.object("chat.completion.chunk", [choice]))

    def object(self, kind: str, choices: list, **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}
        return {**head, "choices": choices, **more}


async def _with_errors(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What goes wrong in mid-answer is told in it: its status has long been sent."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except LiveError as error:
            log.warning("chat_failed code=%s: %s", error.code, error)
            yield _event({"error": error_body(error)})


def _wants_audio(body: bytes) -> bool:
    """Whether the request names the modality; what is no JSON is for SGLang to refuse."""
    try:
        form = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    modalities = form.get("modalities") if isinstance(form, dict) else None
    return isinstance(modalities, list) and "audio" in modalities


def _usage(usage: Usage) -> dict[str, Any]:
    n_in = usage.input_text_tokens + usage.input_audio_tokens
    n_out = usage.output_text_tokens + usage.output_audio_tokens
    return {
        "prompt_tokens": n_in,
        "completion_tokens": n_out,
        "total_tokens": n_in + n_out,
        "prompt_tokens_details": {
            "audio_tokens": usage.input_audio_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "completion_tokens_details": {
            "text_tokens": usage.output_text_tokens,
            "audio_tokens": usage.output_audio_tokens,
        },
    }


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"
