"""POST /v1/audio/transcriptions: a file, written down by the thinker.

In: OpenAI's multipart form. Out: the text, whole or as server-sent events.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sglang_live.core import AudioPart, Usage
from sglang_live.errors import BadInputError, CapacityError, LiveError
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.errors import ClientEventError, cut, error_response
from sglang_live.gateway.http.body import (
    Streamed,
    bounded,
    first_of,
    refuse_query,
    while_connected,
)
from sglang_live.gateway.http.transcription_fields import check_fields, flag, temperature, word
from sglang_live.gateway.http.uploads import read_audio
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.model import brief_session, check_model
from sglang_live.gateway.transcribe import transcribe
from sglang_live.interaction.silero import SpeechModel
from sglang_live.orchestrator.session import Orchestrator

log = logging.getLogger(__name__)

# Room comes when other uploads are done, or by the hand of an operator.
_NO_ROOM_S = 30.0
# verbose_json, srt and vtt tell when each word was said, which the model does not know.
FORMATS = ("json", "text")


@dataclass(frozen=True, slots=True)
class _Wish:
    audio: AudioPart
    language: str | None
    hint: str | None
    temperature: float
    plain: bool
    streamed: bool


class TranscriptionRoute:
    """speech_model: what it finds no speech in has an empty text."""

    def __init__(
        self, orchestrator: Orchestrator, config: GatewayConfig, speech_model: SpeechModel
    ):
        self._orchestrator, self._config = orchestrator, config
        self._speech_model = speech_model

    async def __call__(self, request: Request) -> Response:
        try:
            wish = await self._read(request)
            pieces = self._write_down(wish)
            if wish.streamed:
                # What fails before there is a word is told as an error.
                first = await while_connected(request, first_of(pieces))
                return Streamed(_events(first, pieces), media_type="text/event-stream")
            return _whole(wish, await while_connected(request, _all_of(pieces)))
        except LiveError as error:
            return error_response(error)

    async def _read(self, request: Request) -> _Wish:
        refuse_query(request)
        # The parser spools files to disk, whatever their length.
        request = bounded(request, self._config.max_body_bytes)
        try:
            # One part above all is the file; the others are words.
            async with request.form(max_files=1, max_fields=32) as form:
                return await self._wish(form)
        except HTTPException as error:  # what Starlette makes of a form that it cannot read
            raise BadInputError(f"Invalid form: {error.detail}") from None
        except OSError as error:  # the folder for temporary files is full
            log.error("upload_not_kept error=%s", error)
            raise CapacityError(
                "There is no room for the file at this moment.", retry_after_s=_NO_ROOM_S
            ) from error

    async def _wish(self, form: FormData) -> _Wish:
        check_fields(form)
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ClientEventError(
                "The form needs a 'file'.", code="missing_required_parameter", param="file"
            )
        check_model(self._orchestrator, word(form, "model"))
        shape = word(form, "response_format") or "json"
        if shape not in FORMATS:
            raise ClientEventError(
                f"Unknown response_format {cut(shape)!r}: {', '.join(FORMATS)}.",
                param="response_format",
            )
        data = await file.read()
        return _Wish(
            audio=await asyncio.to_thread(read_audio, data, max_s=self._config.max_input_audio_s),
            language=word(form, "language"),
            hint=word(form, "prompt"),
            temperature=temperature(form),
            plain=shape == "text",
            streamed=flag(form, "stream"),
        )

    async def _write_down(self, wish: _Wish) -> AsyncIterator[str | Usage]:
        async with brief_session(self._orchestrator, new_id("text")) as session:
            made = transcribe(
                session,
                wish.audio,
                self._speech_model,
                language=wish.language,
                hint=wish.hint,
                temperature=wish.temperature,
            )
            async with aclosing(made):
                async for piece in made:
                    yield piece


async def _all_of(pieces: AsyncIterator[str | Usage]) -> list[str | Usage]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


def _whole(wish: _Wish, pieces: list[str | Usage]) -> Response:
    text = "".join(piece for piece in pieces if isinstance(piece, str)).strip()
    if wish.plain:
        return PlainTextResponse(text + "\n")
    [usage] = [piece for piece in pieces if isinstance(piece, Usage)]
    return JSONResponse({"text": text, "usage": _cost(usage)})


async def _events(first: str | Usage, rest: AsyncIterator[str | Usage]) -> AsyncIterator[bytes]:
    text = ""
    async with aclosing(rest):
        piece = first
        while isinstance(piece, str):
            text += piece
            yield _event("transcript.text.delta", delta=piece)
            piece = await anext(rest)
    yield _event("transcript.text.done", text=text.strip(), usage=_cost(piece))


def _event(kind: str, **fields) -> bytes:
    return b"data: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _cost(usage: Usage) -> dict:
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
