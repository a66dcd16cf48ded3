"""POST /v1/audio/transcriptions and translations: a file, written down by the model that hears.

In: OpenAI's multipart form. Out: the text, whole, with its times, or as server-sent events.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sglang_live.core import AudioPart, HeardToken, Usage
from sglang_live.errors import CapacityError
from sglang_live.gateway.audio.files import read_audio
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.flex.tier import Tier
from sglang_live.gateway.http.body import (
    Streamed,
    begun,
    multipart,
    refuse_query,
    server_sent,
    while_connected,
    with_error_event,
)
from sglang_live.gateway.http.timed_text import srt, verbose_json, vtt
from sglang_live.gateway.json_forms import (
    ServiceTier,
    Strict,
    missing_parameter,
    read_value,
    unsupported_parameter,
)
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import MAX_HINT, Name
from sglang_live.gateway.transcribe import (
    Segment,
    check_recognised,
    logprobs_json,
    segments,
    transcribe,
)

log = logging.getLogger(__name__)

# Disk space is free again when other uploads end, or when an operator makes some.
_NO_ROOM_S = 30.0
FORMATS = ["json", "text", "verbose_json", "srt", "vtt"]
# Their segments are the stretches of speech, found in the sound.
_TIMED = FORMATS[2:]
# OpenAI's parameters for other models: this one cannot produce their output or use their input.
_UNSUPPORTED = ("keywords", "known_speaker_names", "known_speaker_references", "languages")
_OF_TRANSCRIPTIONS = ("include", "language", "stream", "timestamp_granularities")
# Lists and objects are written as `name[]` and `name[key]`.
_INNER = re.compile(r"\[.*", re.DOTALL)
# Parameters that are lists.
_LISTS = ("include", "timestamp_granularities")

# A piece of the text, or its tokens, or where it was said; the usage comes last.
Piece = str | tuple[HeardToken, ...] | Segment | Usage


class UploadForm(Strict):
    """Fields of a multipart form, beside its file."""

    model: Name | None = None
    language: Name = ""
    prompt: Annotated[str, Meta(max_length=MAX_HINT)] = ""
    response_format: Annotated[str, Meta(extra_json_schema={"enum": FORMATS})] = "json"
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    stream: bool = False
    include: tuple[Literal["logprobs"], ...] = ()
    timestamp_granularities: tuple[Literal["word", "segment"], ...] = ()
    service_tier: ServiceTier | UnsetType = UNSET

    @property
    def is_timed(self) -> bool:
        return self.response_format in _TIMED

    @property
    def granularities(self) -> list[str]:
        return [*self.timestamp_granularities] or ["segment"]


@dataclass(frozen=True, slots=True)
class _Order:
    """
    in_seconds: a recogniser has no tokens to count.
    task: "transcribe" or "translate".
    language: of the text, as far as it is known.
    """

    audio: AudioPart
    asked: UploadForm
    tier: Tier
    in_seconds: bool
    task: str
    language: str


class TranscriptionRoute:
    """Audio in which the speech model finds no speech has an empty text."""

    def __init__(self, parts: GatewayParts, *, translates: bool = False):
        self._parts = parts
        self._config = parts.config
        self._translates = translates

    async def __call__(self, request: Request) -> Response:
        order = await self._read(request)
        pieces = self._transcribe(order)
        if order.asked.stream:
            # A failure before the first word has an HTTP status.
            _, pieces = await begun(request, pieces)
            events = with_error_event(_events(order, pieces), "transcription", type="error")
            headers = order.tier.headers()
            return Streamed(events, media_type="text/event-stream", headers=headers)
        return _whole(order, await while_connected(request, _all_of(pieces)))

    async def _read(self, request: Request) -> _Order:
        refuse_query(request)
        if self._translates and "translations" not in self._config.model.recogniser_gives:
            raise ClientEventError(
                "This server's model does not translate speech: Whisper with several languages "
                "does.",
                code="unsupported_model",
            )
        try:
            max_bytes = self._config.inputs.max_body_bytes
            async with multipart(request, max_bytes, max_fields=32) as form:
                return await self._order(form, request.headers)
        except OSError as error:  # the folder for temporary files is full
            log.error("upload_not_kept error=%s", error)
            raise CapacityError(
                "There is no disk space for the file at this moment.", retry_after_s=_NO_ROOM_S
            ) from error

    async def _order(self, form: FormData, headers: Headers) -> _Order:
        file = form.get("file")
        refused = _OF_TRANSCRIPTIONS if self._translates else ()
        asked: UploadForm = read_value(_texts(form, refused), UploadForm, "", strict=False)
        if not isinstance(file, UploadFile):
            raise missing_parameter("file")
        self._parts.check_model(asked.model)
        if asked.response_format not in FORMATS:
            raise ClientEventError(
                f"Unknown response_format {cut(asked.response_format)!r}: {', '.join(FORMATS)}.",
                param="response_format",
            )
        self._check_details(asked)
        tier = self._parts.tiers.of(headers, asked.service_tier or None)
        check_recognised(
            self._config.model,
            "",
            language=asked.language,
            hint=asked.prompt,
            temperature=asked.temperature,
        )
        max_s = self._config.inputs.max_input_audio_s
        audio = await asyncio.to_thread(read_audio, await file.read(), max_s=max_s)
        return _Order(
            audio,
            asked,
            tier,
            in_seconds=self._config.model.recognises,
            task="translate" if self._translates else "transcribe",
            language="en" if self._translates else asked.language or self._config.model.hears,
        )

    def _check_details(self, asked: UploadForm) -> None:
        """Raises ClientEventError if the format lacks what is asked for, or the model does."""
        if asked.is_timed and asked.stream:
            raise ClientEventError(
                f"{asked.response_format} is not streamed; json and text are.", param="stream"
            )
        if asked.timestamp_granularities and asked.response_format != "verbose_json":
            raise unsupported_parameter("timestamp_granularities", "is for verbose_json.")
        if asked.include and asked.response_format != "json":
            raise unsupported_parameter("include", "is for json.")
        if "details" in self._config.model.recogniser_gives:
            return
        if "word" in asked.timestamp_granularities:
            raise unsupported_parameter(
                "timestamp_granularities", "has no 'word': this model has no times of words."
            )
        if asked.include:
            raise unsupported_parameter("include", "has no 'logprobs': this model has none.")

    async def _transcribe(self, order: _Order) -> AsyncGenerator[Piece, None]:
        asked, model = order.asked, self._config.model
        gives_details = "details" in model.recogniser_gives
        options: dict[str, Any] = {
            "language": asked.language,
            "hint": asked.prompt,
            "temperature": asked.temperature,
            "in_detail": bool(asked.include) or (gives_details and asked.is_timed),
            "translates": self._translates,
            "flex": order.tier.flex,
        }
        speech_model = self._parts.speech_model
        async with self._parts.brief_session("text", flex=order.tier.flex) as session:
            pieces: AsyncGenerator[Piece, None]
            if asked.is_timed:
                pieces = segments(session, order.audio, speech_model, **options)
            else:
                apart = model.hears_one_utterance
                pieces = transcribe(session, (order.audio,), speech_model, apart=apart, **options)
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece


async def _all_of(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


def _whole(order: _Order, pieces: list[Piece]) -> Response:
    headers = order.tier.headers()
    said = [piece for piece in pieces if isinstance(piece, Segment)]
    match order.asked.response_format:
        case "srt":
            return PlainTextResponse(srt(said), headers=headers)
        case "vtt":
            return PlainTextResponse(vtt(said), headers=headers)
    text = "".join(piece for piece in pieces if isinstance(piece, str)).strip()
    if order.asked.response_format == "text":
        return PlainTextResponse(text + "\n", headers=headers)
    [usage] = [piece for piece in pieces if isinstance(piece, Usage)]
    body: dict[str, Any] = {"text": text}
    if order.asked.is_timed:
        head = {"task": order.task, "language": order.language}
        duration_s = round(order.audio.duration_s, 3)
        body = verbose_json(said, order.asked.granularities, **head, duration=duration_s)
    if order.asked.include:
        body["logprobs"] = logprobs_json(_tokens(pieces))
    return JSONResponse({**body, "usage": _cost(order, usage)}, headers=headers)


def _tokens(pieces: list[Piece]) -> list[HeardToken]:
    return [token for piece in pieces if isinstance(piece, tuple) for token in piece]


async def _events(
    order: _Order, pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[bytes, None]:
    text, usage = "", Usage()
    tokens: list[HeardToken] = []
    async with aclosing(pieces):
        async for piece in pieces:
            match piece:
                case Usage():
                    usage = piece
                case str():
                    text += piece
                    yield server_sent({"type": "transcript.text.delta", "delta": piece})
                case tuple():
                    tokens += piece
    logprobs = {"logprobs": logprobs_json(tokens)} if order.asked.include else {}
    done = {"type": "transcript.text.done", "text": text.strip(), **logprobs}
    yield server_sent({**done, "usage": _cost(order, usage)})


def _cost(order: _Order, usage: Usage) -> dict[str, Any]:
    if order.in_seconds:
        return {"type": "duration", "seconds": round(order.audio.duration_s, 3)}
    n_in = usage.input_text_tokens + usage.input_audio_tokens
    return {
        "type": "tokens",
        "input_tokens": n_in,
        "input_token_details": {
            "text_tokens": usage.input_text_tokens,
            "audio_tokens": usage.input_audio_tokens,
        },
        "output_tokens": usage.output_text_tokens,
        "total_tokens": n_in + usage.output_text_tokens,
    }


def _texts(form: FormData, refused: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a form without its file.

    refused: fields that the route does not have.

    Raises:
        ClientEventError: a field has no meaning for this model, or occurs twice.
    """
    texts: dict[str, Any] = {}
    for written, value in form.multi_items():
        name = _INNER.sub("", written)
        # "auto" lets the server choose; this one does not divide files.
        if name == "chunking_strategy" and value == "auto":
            continue
        if name in (*_UNSUPPORTED, "chunking_strategy"):
            raise unsupported_parameter(name, "has no meaning for this model.")
        if name in refused:
            raise unsupported_parameter(name, "has no meaning for translations.")
        if name in _LISTS:
            texts.setdefault(name, []).append(value)
            continue
        if written in texts:
            raise ClientEventError(f"'{cut(name)}' occurs twice.", param=name)
        texts[written] = value
    texts.pop("file", None)
    return texts
