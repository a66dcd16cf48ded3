"""POST /v1/audio/transcriptions: a file, transcribed by the thinker.

In: OpenAI's multipart form. Out: the text, whole or as server-sent events.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sglang_live.core import AudioPart, Usage
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
from sglang_live.gateway.json_forms import (
    ServiceTier,
    Strict,
    missing_parameter,
    read_value,
    unsupported_parameter,
)
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import MAX_HINT, Name
from sglang_live.gateway.transcribe import check_recognised, transcribe

log = logging.getLogger(__name__)

# Disk space is free again when other uploads end, or when an operator makes some.
_NO_ROOM_S = 30.0
# verbose_json, srt and vtt have times of words, which the model does not produce.
FORMATS = ["json", "text"]
# OpenAI's parameters for other models: this one cannot produce their output or use their input.
_UNSUPPORTED = (
    "include",
    "keywords",
    "known_speaker_names",
    "known_speaker_references",
    "languages",
    "timestamp_granularities",
)
# Lists and objects are written as `name[]` and `name[key]`.
_INNER = re.compile(r"\[.*", re.DOTALL)

Piece = str | Usage  # a piece of the text; the usage comes last


class UploadForm(Strict):
    """Fields of a multipart form, beside its file."""

    model: Name | None = None
    language: Name = ""
    prompt: Annotated[str, Meta(max_length=MAX_HINT)] = ""
    response_format: Annotated[str, Meta(extra_json_schema={"enum": FORMATS})] = "json"
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    stream: bool = False
    service_tier: ServiceTier | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class _Order:
    """in_seconds: a recogniser has no tokens to count."""

    audio: AudioPart
    asked: UploadForm
    tier: Tier
    in_seconds: bool


class TranscriptionRoute:
    """Audio in which the speech model finds no speech has an empty text."""

    def __init__(self, parts: GatewayParts):
        self._parts = parts
        self._config = parts.config

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
        asked: UploadForm = read_value(_texts(form), UploadForm, "", strict=False)
        if not isinstance(file, UploadFile):
            raise missing_parameter("file")
        self._parts.check_model(asked.model)
        if asked.response_format not in FORMATS:
            raise ClientEventError(
                f"Unknown response_format {cut(asked.response_format)!r}: {', '.join(FORMATS)}.",
                param="response_format",
            )
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
        return _Order(audio, asked, tier, in_seconds=self._config.model.recognises)

    async def _transcribe(self, order: _Order) -> AsyncGenerator[Piece, None]:
        async with self._parts.brief_session("text", flex=order.tier.flex) as session:
            pieces = transcribe(
                session,
                (order.audio,),
                self._parts.speech_model,
                apart=self._config.model.hears_one_utterance,
                language=order.asked.language,
                hint=order.asked.prompt,
                temperature=order.asked.temperature,
                flex=order.tier.flex,
            )
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece


async def _all_of(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


def _whole(order: _Order, pieces: list[Piece]) -> Response:
    text = "".join(piece for piece in pieces if isinstance(piece, str)).strip()
    headers = order.tier.headers()
    if order.asked.response_format == "text":
        return PlainTextResponse(text + "\n", headers=headers)
    [usage] = [piece for piece in pieces if isinstance(piece, Usage)]
    return JSONResponse({"text": text, "usage": _cost(order, usage)}, headers=headers)


async def _events(
    order: _Order, pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[bytes, None]:
    text, usage = "", Usage()
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, Usage):
                usage = piece
                continue
            text += piece
            yield server_sent({"type": "transcript.text.delta", "delta": piece})
    yield server_sent(
        {"type": "transcript.text.done", "text": text.strip(), "usage": _cost(order, usage)}
    )


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


def _texts(form: FormData) -> dict[str, Any]:
    """The fields of a form without its file.

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
        if written in texts:
            raise ClientEventError(f"'{cut(name)}' occurs twice.", param=name)
        texts[written] = value
    texts.pop("file", None)
    return texts
