"""POST /v1/audio/speech: a text, spoken word for word by the talker.

In: OpenAI's request. Out: audio while it is made, as a file or as server-sent events.
A flex request is not heard while it is made, and gets a file with its true length.
A long text is spoken piece by piece. Speech that exceeds the longest duration of its text ends
there and the rest is not spoken: events report it as an error, a file is incomplete.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from sglang_live.core import (
    OUTPUT_RATE_HZ,
    AudioDelta,
    HistoryItem,
    TextPart,
    TurnDone,
    TurnRequest,
    Usage,
)
from sglang_live.errors import LiveError, StageFailedError
from sglang_live.gateway.audio.codec import encode_base64
from sglang_live.gateway.audio.files import FORMATS, FileFormat, check_format
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.flex.tier import Tier
from sglang_live.gateway.http.body import (
    Streamed,
    begun,
    read_body,
    read_json,
    refuse_query,
    server_sent,
    with_error_event,
)
from sglang_live.gateway.http.speech_pieces import Fades, longest_s, pieces_of
from sglang_live.gateway.json_forms import ServiceTier, Strict, check_neutral
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import Name, VoiceRef, voice_name
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import VoiceSession
from sglang_live.sound.tempo import MAX_SPEED, MIN_SPEED, Tempo
from sglang_live.speakable.style import script_of

log = logging.getLogger(__name__)

_MAX_CHARACTERS = 4096
_DEFAULT_FORMAT = "mp3"
# The talker has no input for these. The values change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"instructions": ("",)}
_MAX_BODY_BYTES = 1 << 16
_SSE = "text/event-stream"
_R = TypeVar("_R")


class SpeechTruncatedError(LiveError):
    """The talker's speech did not end within the longest duration of its text."""

    code = "speech_truncated"


class SpeechForm(Strict):
    """
    service_tier: "flex": speech that is heard while it is made goes before this one.
    instructions: see _NEUTRAL.
    """

    input: Annotated[str, Meta(min_length=1, max_length=_MAX_CHARACTERS)]
    voice: Name | VoiceRef | None = None
    model: str | None = None
    response_format: str | None = None
    stream_format: Literal["audio", "sse"] | None = "audio"
    speed: Annotated[float, Meta(ge=MIN_SPEED, le=MAX_SPEED)] | None = None
    instructions: str | None = None
    service_tier: ServiceTier | None = None

    @property
    def format(self) -> str:
        return _DEFAULT_FORMAT if self.response_format is None else self.response_format


class SpeechRoute:
    def __init__(self, parts: GatewayParts):
        self._parts = parts

    async def __call__(self, request: Request) -> Response:
        refuse_query(request)
        form = self._read(await read_body(request, _MAX_BODY_BYTES))
        tier = self._parts.tiers.of(request.headers, form.service_tier)
        owner = self._parts.keys.owner(request.headers)
        voice = self._parts.voice_of(owner, voice_name(form.voice))
        # A voice that is deleted now speaks to the end.
        spoken = _Voice(voice, self._parts.speaker_of(owner, voice))
        sse, form_of_file = form.stream_format == "sse", FORMATS[form.format]
        grows = form_of_file.grows and (sse or not tier.flex)
        cost = _Cost()
        audio = self._speak(form, spoken, cost, tier)
        if form.speed is not None and form.speed != 1:
            audio = _at_speed(audio, form.speed)
        file = _file(audio, form_of_file, grows=grows)
        # A failure before the first bytes has an HTTP status, not an incomplete file.
        first, data = await begun(request, file)
        headers = tier.headers()
        if sse:
            events = with_error_event(_events(data, cost), "speech", type="error")
            response = Streamed(events, media_type=_SSE, headers=headers)
        else:
            headers |= {} if grows else {"content-length": str(len(first or b""))}
            response = Streamed(data, media_type=form_of_file.media_type, headers=headers)
        response.usage = cost.to_json
        return response

    def _read(self, body: bytes) -> SpeechForm:
        form = read_json(body, SpeechForm)
        if not form.input.strip():
            raise ClientEventError("There is no text to speak in 'input'.", param="input")
        if form.format not in FORMATS:
            raise ClientEventError(
                f"Unknown response_format {cut(form.format)!r}: {', '.join(FORMATS)}.",
                param="response_format",
            )
        check_format(form.format, "response_format")
        for name, values in _NEUTRAL.items():
            check_neutral(getattr(form, name), values, name)
        self._parts.check_model(form.model)
        return form

    async def _speak(
        self, form: SpeechForm, voice: "_Voice", cost: "_Cost", tier: Tier
    ) -> AsyncGenerator[bytes, None]:
        """Yields int16 at OUTPUT_RATE_HZ while it is made.

        Raises:
            ClientEventError: nothing of the text has a sound, as in a script that the voice lacks.
            SpeechTruncatedError: the speech of a piece exceeds its longest duration.
        """
        pieces, has_sound = pieces_of(form.input), False
        async with self._parts.brief_session("speech", flex=tier.flex) as session:
            for n, text in enumerate(pieces):
                turn = _turn(voice, text, tier)
                fades = Fades(fades_in=n > 0, fades_out=n + 1 < len(pieces))
                async with aclosing(self._speak_piece(session, turn, text, cost)) as audio:
                    async for pcm in audio:
                        has_sound = has_sound or len(pcm) > 0
                        if ready := fades.push(pcm):
                            yield ready
                if rest := fades.finish():
                    yield rest
        if not has_sound:
            scripts = sorted({script_of(character) for character in form.input} - {""})
            of = f", which is in {cut(', '.join(scripts))}" if scripts else ""
            raise ClientEventError(f"The voice can speak nothing of 'input'{of}.", param="input")

    async def _speak_piece(
        self, session: VoiceSession, turn: TurnRequest, text: str, cost: "_Cost"
    ) -> AsyncGenerator[bytes, None]:
        left_bytes = 2 * OUTPUT_RATE_HZ * longest_s(text)
        async with aclosing(session.respond(turn)) as events:
            async for event in events:
                match event:
                    case AudioDelta():
                        left_bytes -= len(event.pcm)
                        if left_bytes < 0:
                            raise self._truncated(text)
                        yield event.pcm
                    case TurnDone():
                        cost.add(event.usage)
                        if event.status == "incomplete":
                            raise self._truncated(text)
                        return
        raise StageFailedError("The turn ended without a result.")

    def _truncated(self, text: str) -> SpeechTruncatedError:
        self._parts.metrics.speech_truncated.inc()
        return SpeechTruncatedError(
            f"The speech did not end within {longest_s(text):.0f} s, the longest duration of "
            f"{len(text)} characters. It is truncated; the text after it is not spoken."
        )


@dataclass(frozen=True, slots=True)
class _Voice:
    """As TurnRequest has it."""

    name: str
    speaker: bytes


def _turn(voice: _Voice, text: str, tier: Tier) -> TurnRequest:
    item = HistoryItem(key=new_id("key"), role="user", parts=(TextPart(text),))
    return TurnRequest(
        instructions="",
        history=(item,),
        voice=voice.name,
        speaker=voice.speaker,
        stateless=True,
        script=text,
        flex=tier.flex,
    )


@dataclass
class _Cost:
    """Usage of all pieces. n_read: tokens of text. n_spoken: frames of audio."""

    n_read: int = 0
    n_spoken: int = 0

    def add(self, usage: Usage) -> None:
        # The script counts as the thinker's output, but it is the talker's input.
        self.n_read += usage.input_text_tokens + usage.output_text_tokens
        self.n_spoken += usage.output_audio_tokens

    def to_json(self) -> dict[str, int]:
        total = self.n_read + self.n_spoken
        return {
            "input_tokens": self.n_read,
            "output_tokens": self.n_spoken,
            "total_tokens": total,
        }


async def _at_speed(
    audio: AsyncGenerator[bytes, None], speed: float
) -> AsyncGenerator[bytes, None]:
    tempo = Tempo(speed, OUTPUT_RATE_HZ)
    async with aclosing(audio):
        async for pcm in audio:
            yield tempo.push(pcm)
    yield tempo.finish()


async def _file(
    audio: AsyncGenerator[bytes, None], form: FileFormat, *, grows: bool
) -> AsyncGenerator[bytes, None]:
    async def run(encode: Callable[..., _R], *pcm: bytes) -> _R:
        return await asyncio.to_thread(encode, *pcm) if form.blocks else encode(*pcm)

    with closing(await run(form.growing if grows else form.whole)) as encoder:
        async with aclosing(audio):
            async for pcm in audio:
                if data := await run(encoder.push, pcm):
                    yield data
        if data := await run(encoder.finish):
            yield data


async def _events(file: AsyncGenerator[bytes, None], cost: _Cost) -> AsyncGenerator[bytes, None]:
    """The file in server-sent events. Unlike a bare file, they can report an error."""
    async with aclosing(file):
        async for piece in file:
            yield server_sent({"type": "speech.audio.delta", "audio": encode_base64(piece)})
    yield server_sent({"type": "speech.audio.done", "usage": cost.to_json()})
