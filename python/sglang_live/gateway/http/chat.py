"""POST /v1/chat/completions: spoken completions. SGLang's own route makes those of text alone.

In: OpenAI's JSON. Out: a completion with audio and transcript, whole or in chunks.
"""

import asyncio
import binascii
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang_live.core import (
    AudioDelta,
    AudioPart,
    HistoryItem,
    Part,
    PromptContent,
    TextPart,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
    Usage,
    VideoPart,
)
from sglang_live.errors import BadInputError
from sglang_live.gateway.audio.codec import encode_base64
from sglang_live.gateway.audio.files import FORMATS, read_audio
from sglang_live.gateway.auth import owner_salt
from sglang_live.gateway.call.conversation.items import call_as_text
from sglang_live.gateway.chat.form import ChatForm, check_spoken
from sglang_live.gateway.chat.messages import AudioPart as AudioForm
from sglang_live.gateway.chat.messages import AudioUrlPart as AudioUrlForm
from sglang_live.gateway.chat.messages import FramesPart as FramesForm
from sglang_live.gateway.chat.messages import ImageUrlPart as ImageUrlForm
from sglang_live.gateway.chat.messages import Message, SpokenAnswers, read_messages
from sglang_live.gateway.chat.messages import TextPart as TextForm
from sglang_live.gateway.chat.messages import VideoUrlPart as VideoUrlForm
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.flex.tier import Tier
from sglang_live.gateway.http.body import (
    InputLimits,
    Streamed,
    begun,
    read_body,
    read_json,
    refuse_query,
    server_sent,
    while_connected,
    with_error_event,
)
from sglang_live.gateway.model import ServedModel
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.pictures import (
    MAX_VIDEO_S,
    MAX_VIDEOS,
    check_number,
    read_frames,
    read_picture,
    read_video,
)
from sglang_live.gateway.realtime.item_schema import check_text
from sglang_live.gateway.tools import read_calls, tools_of
from sglang_live.ids import new_id

log = logging.getLogger(__name__)

# As Qwen's clients write it, often without a type.
_DATA_URI = re.compile(r"data:[\w.+/-]*;base64,")


class ChatRoute:
    """
    text_only: serves requests for text alone, with their body; None: this route serves them too.
    """

    def __init__(
        self,
        parts: GatewayParts,
        text_only: Callable[[Request, bytes], Awaitable[Response]] | None,
    ):
        self._parts = parts
        self._text_only = text_only

    async def __call__(self, request: Request) -> Response:
        parts = self._parts
        body = await read_body(request, parts.config.inputs.max_body_bytes)
        if self._text_only and not _is_ours(body, recognises=parts.config.model.recognises):
            return await self._text_only(request, body)
        refuse_query(request)
        form = read_json(body, ChatForm)
        check_spoken(form)
        tier = parts.tiers.of(request.headers, form.service_tier)
        owner = parts.keys.owner(request.headers)
        turn = await asyncio.to_thread(self._turn, form, owner, tier)
        await self._check_context(turn)
        completion = _Completion(form, parts.orchestrator.model_name, tier)
        events = self._events(turn)
        if form.stream:
            _, events = await begun(request, events)
            data = with_error_event(self._chunks(completion, events), "chat")
            return Streamed(data, media_type="text/event-stream", headers=tier.headers())
        await while_connected(request, completion.take_all(events))
        calls = self._calls(completion)
        file = await asyncio.to_thread(completion.file)  # a minute of mp3 takes half a second
        whole = self._whole(completion, file, calls)
        return JSONResponse(whole, headers=tier.headers())

    def _turn(self, form: ChatForm, owner: str, tier: Tier) -> TurnRequest:
        config = self._parts.config
        self._parts.check_model(form.model)
        voice = self._parts.voice_of(owner, form.voice, "audio.voice")
        instructions, history = history_of(
            form.messages,
            self._parts.answers,
            limits=config.inputs,
            model=config.model,
        )
        return TurnRequest(
            instructions=instructions or config.model.default_instructions,
            history=history,
            voice=voice,
            speaker=self._parts.speaker_of(owner, voice),
            wants_audio=form.wants_audio,
            max_output_tokens=form.limit,
            temperature=form.temperature,
            seed=form.seed,
            stateless=True,
            tools=tools_of(form.functions_of(), form.choice()),
            cache_salt=owner_salt(owner),
            flex=tier.flex,
        )

    async def _check_context(self, turn: TurnRequest) -> None:
        """Raises ClientEventError if the turn cannot fit, or has too much text to measure."""
        functions = turn.tools.functions
        content = PromptContent.of(turn.history, turn.instructions, functions)
        check_text(content.n_characters + len(content.instructions), "messages")
        header_at = "tools" if functions else "messages"
        limit = self._parts.context_limit
        await limit.check(content, header_at=header_at, items_at="messages")

    async def _events(self, turn: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        async with (
            self._parts.brief_session("chat", flex=turn.flex) as session,
            aclosing(session.respond(turn)) as events,
        ):
            async for event in events:
                yield event

    def _whole(
        self, completion: "_Completion", file: bytes, calls: list[dict[str, Any]]
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        if not completion.form.wants_audio or (completion.text and not completion.pcm):
            message["content"] = completion.text
        elif completion.pcm:
            message["audio"] = {
                "id": completion.audio_id,
                "data": encode_base64(file),
                "transcript": completion.text,
                "expires_at": self._parts.answers.keep(completion.audio_id, completion.text),
            }
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": completion.finish_reason(calls),
            "logprobs": None,
        }
        return completion.object("chat.completion", [choice], usage=_usage(completion.end.usage))

    async def _chunks(
        self, completion: "_Completion", events: AsyncGenerator[TurnEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        joined = _JoinedPcm() if completion.form.is_in_qwens_form else None
        async with aclosing(events):
            yield completion.chunk({"role": "assistant", "content": None})
            async for event in events:
                completion.take(event)
                match event:
                    case TranscriptDelta() if event.text and (
                        joined is not None or not completion.form.wants_audio
                    ):
                        yield completion.chunk({"content": event.text})
                    case TranscriptDelta() if event.text:
                        audio = {"id": completion.audio_id, "transcript": event.text}
                        yield completion.chunk({"audio": audio})
                    case AudioDelta():
                        pcm = event.pcm if joined is None else joined.push(event.pcm)
                        if pcm:
                            audio = {"id": completion.audio_id, "data": encode_base64(pcm)}
                            yield completion.chunk({"audio": audio})
        if joined is not None:
            if rest := joined.rest:
                audio = {"id": completion.audio_id, "data": encode_base64(rest)}
                yield completion.chunk({"audio": audio})
        elif completion.pcm:
            until = self._parts.answers.keep(completion.audio_id, completion.text)
            yield completion.chunk({"audio": {"id": completion.audio_id, "expires_at": until}})
        n_sent = len(completion.text)
        calls = self._calls(completion)
        if malformed := completion.text[n_sent:]:
            yield completion.chunk({"content": malformed})
        if calls:
            indexed = [{"index": n, **call} for n, call in enumerate(calls)]
            yield completion.chunk({"tool_calls": indexed})
        yield completion.chunk({}, completion.finish_reason(calls))
        if completion.form.stream_options and completion.form.stream_options.include_usage:
            usage = _usage(completion.end.usage)
            yield server_sent(completion.object("chat.completion.chunk", [], usage=usage))
        yield b"data: [DONE]\n\n"

    def _calls(self, completion: "_Completion") -> list[dict[str, Any]]:
        """The function calls. If the completion has nothing else, malformed ones are its text."""
        calls, malformed = read_calls(
            completion.end.function_calls,
            completion.form.functions_of(),
            most=completion.form.max_calls,
            metrics=self._parts.metrics,
            response_id=completion.id,
        )
        is_empty = not calls and not completion.text and not completion.pcm
        if is_empty and completion.end.status == "completed":
            completion.take(TranscriptDelta(malformed, 0))
        return [
            {
                "id": new_id("call"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]


class _JoinedPcm:
    """PCM16 in pieces whose base64 has no padding: Qwen's clients join the text of all pieces and
    decode it once, which ends at the first padding."""

    _BYTES = 6  # whole samples, and whole groups of base64

    def __init__(self) -> None:
        self.rest = b""

    def push(self, pcm: bytes) -> bytes:
        self.rest += pcm
        n = len(self.rest) // self._BYTES * self._BYTES
        pieces, self.rest = self.rest[:n], self.rest[n:]
        return pieces


@dataclass(eq=False)
class _Completion:
    """Text, audio and end of one completion, as far as they have arrived."""

    form: ChatForm
    model: str
    tier: Tier
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    audio_id: str = field(default_factory=lambda: new_id("audio"))
    created_s: int = field(default_factory=lambda: int(time.time()))
    text: str = ""
    pcm: list[bytes] = field(default_factory=list)
    _end: TurnDone | None = None

    @property
    def end(self) -> TurnDone:
        assert self._end is not None, "the turn has not ended"
        return self._end

    def file(self) -> bytes:
        if not self.pcm:
            return b""
        name = self.form.format
        return FORMATS["pcm" if name == "pcm16" else name].file(b"".join(self.pcm))

    async def take_all(self, events: AsyncGenerator[TurnEvent, None]) -> None:
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
                self._end = event

    def finish_reason(self, calls: list[dict[str, Any]]) -> str:
        if calls:
            return "tool_calls"
        return "length" if self.end.status == "incomplete" else "stop"

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return server_sent(self.object("chat.completion.chunk", [choice]))

    def object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}
        return {**head, **self.tier.fields(), "choices": choices, **more}


def _is_ours(body: bytes, *, recognises: bool) -> bool:
    """Whether SGLang's route cannot serve the request: it names the audio modality, forces a
    function call, of which that route makes none where it has no parser, or has sound for a model
    that only reads. Returns False if it is not JSON.

    Args:
        recognises: a recogniser writes down what the model is to hear.
    """
    try:
        form = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(form, dict):
        return False
    modalities = form.get("modalities")
    if isinstance(modalities, list) and "audio" in modalities:
        return True
    forces = form.get("tool_choice") not in (None, "auto", "none")
    return forces or (recognises and _has_sound(form.get("messages")))


def _has_sound(messages: Any) -> bool:
    contents = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict)
    ]
    return any(
        isinstance(part, dict) and part.get("type") in ("input_audio", "audio_url")
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _usage(usage: Usage) -> dict[str, Any]:
    n_in = usage.input_tokens
    n_out = usage.output_text_tokens + usage.output_audio_tokens
    return {
        "prompt_tokens": n_in,
        "completion_tokens": n_out,
        "total_tokens": n_in + n_out,
        "prompt_tokens_details": {
            "audio_tokens": usage.input_audio_tokens,
            "image_tokens": usage.input_image_tokens,
            "video_tokens": usage.input_video_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "completion_tokens_details": {
            "text_tokens": usage.output_text_tokens,
            "audio_tokens": usage.output_audio_tokens,
        },
    }


# --- reader of a chat completion's messages into a turn's history ---


def history_of(
    messages: list[Message], answers: SpokenAnswers, *, limits: InputLimits, model: ServedModel
) -> tuple[str, tuple[HistoryItem, ...]]:
    """The instructions, and the history without them.

    Args:
        answers: earlier ones, to which messages may refer.
        limits: of audio in all messages together, and of one picture.
    Raises:
        ClientEventError: see read_messages; a medium that cannot be read, or no message.
    """
    reading = _Reading(limits)
    kinds = {AudioUrlForm: True, ImageUrlForm: model.sees}
    kinds |= dict.fromkeys((VideoUrlForm, FramesForm), model.watches)
    takes = tuple(kind for kind in kinds if kinds[kind])
    instructions: list[str] = []
    items: list[HistoryItem] = []
    for n, message in enumerate(read_messages(messages, answers, takes)):
        if message.role == "system" or message.role == "developer":
            parts = [part.text for part in message.parts if isinstance(part, TextForm)]
            instructions += [text for text in parts if text]
        else:
            items += reading.items(message, f"messages[{n}]")
    if not items:
        raise ClientEventError("There is no message to respond to.", param="messages")
    return "\n\n".join(instructions), tuple(items)


class _Reading:
    """State from message to message: seconds of audio and video left, and pictures so far."""

    def __init__(self, limits: InputLimits):
        self._left_s: float = limits.max_input_audio_s
        self._max_bytes: int = limits.max_append_bytes
        self._left_video_s: float = MAX_VIDEO_S
        self._n_pictures = self._n_videos = 0

    def items(self, message: Message, at: str) -> list[HistoryItem]:
        """None for an answer that said nothing."""
        assert message.role != "system" and message.role != "developer"
        parts: list[Part] = []
        for n, part in enumerate(message.parts):
            if isinstance(part, TextForm):
                parts.append(TextPart(part.text))
            elif isinstance(part, AudioForm):
                at_data = f"{at}.content[{n}].input_audio.data"
                parts.append(self._audio(part.input_audio.data, at_data))
            elif isinstance(part, AudioUrlForm):
                at_url = f"{at}.content[{n}].audio_url.url"
                _check_within("audio", part.audio_url.url, at_url)
                parts.append(self._audio(part.audio_url.url, at_url))
            elif isinstance(part, VideoUrlForm | FramesForm):
                parts.append(self._video(part, f"{at}.content[{n}]"))
            elif isinstance(part, ImageUrlForm):
                self._n_pictures += 1
                check_number(self._n_pictures, "messages")
                url, path = part.image_url, f"{at}.content[{n}].image_url.url"
                read = read_picture(url.url, url.detail, max_bytes=self._max_bytes, path=path)
                parts.append(read.image)
        found = []
        if message.text or message.role != "assistant":
            found.append(HistoryItem(key=new_id("key"), role=message.role, parts=tuple(parts)))
        for call in message.tool_calls or ():
            found.append(call_as_text(call.function.name, call.function.arguments or ""))
        return found

    def _video(self, form: VideoUrlForm | FramesForm, at: str) -> VideoPart:
        at += ".video" if isinstance(form, FramesForm) else ".video_url.url"
        self._n_videos += 1
        if self._n_videos > MAX_VIDEOS:
            raise ClientEventError(f"At most {MAX_VIDEOS} videos.", param=at)
        left_s = self._left_video_s
        if isinstance(form, FramesForm):
            video, duration_s = read_frames(
                form.video, form.fps, max_s=left_s, max_bytes=self._max_bytes, path=at
            )
        else:
            url, detail = form.video_url.url, form.video_url.detail
            _check_within("video", url, at)
            video, duration_s = read_video(_data(url, at), detail, max_s=left_s, path=at)
        self._left_video_s -= duration_s
        return video

    def _audio(self, text: str, at: str) -> AudioPart:
        data = _data(text, at)
        try:
            audio = read_audio(data, max_s=self._left_s)
        except BadInputError as error:
            raise ClientEventError(f"{at}: {error}", code=error.code, param=at) from None
        self._left_s -= audio.duration_s
        return audio


def _check_within(what: str, url: str, at: str) -> None:
    if not _DATA_URI.match(url):
        raise ClientEventError(
            f"{at} must have the {what} within it, as a data URI: a spoken answer fetches nothing.",
            param=at,
        )


def _data(text: str, at: str) -> bytes:
    """text: base64, with or without the beginning of a data URI."""
    found = _DATA_URI.match(text)
    try:
        return binascii.a2b_base64(text[found.end() :] if found else text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise ClientEventError(f"{at} is not base64.", param=at) from None
