"""POST /v1/audio/speech: a text, spoken by the talker as it stands.

In: OpenAI's request. Out: audio while it is made, as a file or as server-sent events.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Literal

import orjson
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.audio_codec import encode_base64
from sglang_live.gateway.audio_files import FORMATS, Encoder
from sglang_live.gateway.event_error import error_body
from sglang_live.gateway.http_body import (
    Streamed,
    first_of,
    read_body,
    read_json,
    while_connected,
)
from sglang_live.gateway.http_errors import error_response
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.model import brief_session, check_model, voice_of
from sglang_live.gateway.realtime_events import VoiceRef, voice_name
from sglang_live.orchestrator.history import (
    AudioDelta,
    HistoryItem,
    TextPart,
    TurnDone,
    TurnRequest,
)
from sglang_live.orchestrator.session import Orchestrator

log = logging.getLogger(__name__)

_MAX_CHARACTERS = 4096
_MAX_BODY_BYTES = 1 << 16


class SpeechForm(Struct):
    """speed: 1 alone. instructions: accepted, no effect: the talker takes none."""

    input: Annotated[str, Meta(min_length=1, max_length=_MAX_CHARACTERS)]
    voice: str | VoiceRef | None = None
    model: str | None = None
    response_format: str = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    speed: float = 1.0
    instructions: str | None = None


class SpeechRoute:
    def __init__(self, orchestrator: Orchestrator):
        self._orchestrator = orchestrator

    async def __call__(self, request: Request) -> Response:
        try:
            form = self._read(await read_body(request, _MAX_BODY_BYTES))
            media_type, encoder = FORMATS[form.response_format]
            audio = self._speak(form)
            # What fails before there is a sound is told as an error, not as a broken file.
            first = await while_connected(request, first_of(audio)) or b""
        except LiveError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        data = _file(first, audio, encoder())
        if form.stream_format == "sse":
            data, media_type = _events(data), "text/event-stream"
        return Streamed(data, media_type=media_type)

    def _read(self, body: bytes) -> SpeechForm:
        form = read_json(body, SpeechForm)
        if not form.input.strip():
            raise BadInputError("There is nothing to say in 'input'.")
        if form.response_format not in FORMATS:
            raise BadInputError(
                f"Unknown response_format {form.response_format!r}: {', '.join(FORMATS)}."
            )
        if form.speed != 1.0:
            raise BadInputError("Only speed 1 is supported.")
        check_model(self._orchestrator, form.model)
        return form

    async def _speak(self, form: SpeechForm) -> AsyncIterator[bytes]:
        """int16 at OUTPUT_RATE_HZ, as it comes."""
        turn = self._turn(form)
        async with (
            brief_session(self._orchestrator, turn.turn_id) as session,
            aclosing(session.respond(turn)) as events,
        ):
            async for event in events:
                match event:
                    case AudioDelta():
                        yield event.pcm
                    case TurnDone():
                        return

    def _turn(self, form: SpeechForm) -> TurnRequest:
        read = HistoryItem(key=new_id("key"), role="user", parts=(TextPart(form.input),))
        return TurnRequest(
            turn_id=new_id("speech"),
            instructions="",
            history=(read,),
            voice=voice_of(self._orchestrator.voices, voice_name(form.voice)),
            stateless=True,
            script=form.input,
        )


async def _file(
    first: bytes, audio: AsyncIterator[bytes], encoder: Encoder
) -> AsyncIterator[bytes]:
    async with aclosing(audio):
        if data := encoder.push(first):
            yield data
        async for pcm in audio:
            if data := encoder.push(pcm):
                yield data
    if data := encoder.finish():
        yield data


async def _events(file: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A file that breaks off can only break off; events can say so."""
    async with aclosing(file):
        try:
            async for piece in file:
                yield _event("speech.audio.delta", audio=encode_base64(piece))
        except LiveError as error:
            log.warning("speech_failed code=%s: %s", error.code, error)
            yield _event("error", error=error_body(error))
            return
    yield _event("speech.audio.done")


def _event(kind: str, **fields: str) -> bytes:
    return b"data: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"
