"""Transcription by the model of the conversation, in a stateless turn.

In: audio. Out: text as it comes, and where it was said; no text for audio without speech.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from prometheus_client import Counter

from sglang_live.core import (
    INPUT_RATE_HZ,
    AudioPart,
    HeardToken,
    HistoryItem,
    TextPart,
    TranscriptDelta,
    TurnDone,
    TurnRequest,
    Usage,
)
from sglang_live.errors import LiveError, StageFailedError
from sglang_live.gateway.json_forms import check_neutral
from sglang_live.gateway.model import ServedModel
from sglang_live.ids import new_id
from sglang_live.interaction.presence import speech_only, stretches, utterances
from sglang_live.interaction.silero import SpeechModel
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)

# The instruction that Qwen3-Omni was trained with.
_INSTRUCTION = "Transcribe the audio into text."
# A minute of fast speech has about 250 words.
_TOKENS_PER_S = 10
_MIN_TOKENS = 64


def check_recognised(
    model: ServedModel,
    at: str,
    *,
    language: str | None,
    hint: str | None,
    temperature: float = 0.0,
) -> None:
    """Raises ClientEventError if a recogniser would transcribe without heeding a setting.

    at: path of the settings, with a dot at its end.
    """
    if not model.recognises:
        return
    same = (language or "").lower().split("-")[0] == model.hears
    check_neutral(None if same else language, ("", model.hears), f"{at}language")
    check_neutral(hint, ("",), f"{at}prompt")
    check_neutral(temperature, (0,), f"{at}temperature")


def hints_of(settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The language and the hint of a session's transcription settings: `language`, `prompt`, and in
    words of the hint `languages`, if there are several, and `keywords`."""
    language, languages = settings.get("language"), settings.get("languages") or []
    hints = [settings.get("prompt") or ""]
    if language is None and len(languages) == 1:
        [language] = languages
    elif languages:
        hints.append(f"Languages: {', '.join(languages)}.")
    if words := settings.get("keywords"):
        hints.append(f"Words that may be said: {', '.join(words)}.")
    return language, " ".join(filter(None, hints)) or None


async def text_of(
    session: VoiceSession, clips: tuple[AudioPart, ...], language: str | None, outcomes: Counter
) -> str | None:
    """The words of clips that a recogniser has heard to be speech.

    Args:
        language: of the speech; None: any.
        outcomes: counts a failure, as `failed`.
    Returns:
        None if the turn failed: then the sound decides alone.
    """
    try:
        deltas = transcribe(session, clips, None, language=language)
        return "".join([delta async for delta in deltas if isinstance(delta, str)])
    except LiveError as error:
        log.warning("words_unknown code=%s", error.code)
    except Exception:
        log.exception("words_crashed")
    outcomes.labels("failed").inc()
    return None


@dataclass(frozen=True, slots=True)
class Segment:
    """What was said without a pause, between two times of the recording.

    tokens: of a recogniser that gives "details"; their times count from the recording's begin.
    """

    text: str
    begin_s: float
    end_s: float
    tokens: tuple[HeardToken, ...]


def logprobs_json(tokens: Iterable[HeardToken]) -> list[dict[str, Any]]:
    return [
        {
            "token": token.piece.decode(errors="replace"),
            "logprob": token.logprob,
            "bytes": list(token.piece),
        }
        for token in tokens
    ]


async def segments(
    session: VoiceSession, clip: AudioPart, speech_model: SpeechModel, **options: Any
) -> AsyncGenerator[Segment | Usage, None]:
    """Transcribe each stretch of speech for itself. Arguments and errors as of transcribe()."""
    usage = Usage()
    for begin, end in await asyncio.to_thread(stretches, clip.pcm, speech_model):
        text, at_s = "", begin / INPUT_RATE_HZ
        turn = _turn((AudioPart(clip.pcm[begin:end]),), **options)
        async with aclosing(_outputs(session, turn)) as outputs:
            async for output in outputs:
                if isinstance(output, str):
                    text += output
                    continue
                usage += output.usage
                tokens = tuple(
                    replace(token, begin_s=at_s + token.begin_s, end_s=at_s + token.end_s)
                    for token in output.heard
                )
                if text := text.strip():
                    yield Segment(text, at_s, end / INPUT_RATE_HZ, tokens)
    yield usage


async def transcribe(
    session: VoiceSession,
    clips: tuple[AudioPart, ...],
    speech_model: SpeechModel | None,
    *,
    apart: bool = False,
    **options: Any,
) -> AsyncGenerator[str | tuple[HeardToken, ...] | Usage, None]:
    """Yield the deltas of the text, with `in_detail` the tokens behind those of each turn, then the
    usage.

    Args:
        clips: of one recording.
        speech_model: finds the speech; long silences are removed, because the model invents words
            for them. None: the clips are speech, as a recogniser has heard it.
        apart: the model hears one utterance at a time.
        options: of _turn.
    Raises:
        LiveError: the turn failed.
    """
    groups = [clips]
    if speech_model is not None:
        spoken = utterances if apart else _one_clip
        found = [await asyncio.to_thread(spoken, clip.pcm, speech_model) for clip in clips]
        parts = tuple(AudioPart(speech) for stretches in found for speech in stretches)
        groups = [(part,) for part in parts] if apart else [parts] * bool(parts)
    usage, space = Usage(), ""
    for group in groups:
        async with aclosing(_outputs(session, _turn(group, **options))) as outputs:
            async for output in outputs:
                if isinstance(output, str):
                    yield space + output
                    space = ""
                    continue
                usage += output.usage
                if output.heard:
                    yield output.heard
        space = " "
    yield usage


async def _outputs(
    session: VoiceSession, turn: TurnRequest
) -> AsyncGenerator[str | TurnDone, None]:
    async with aclosing(session.respond(turn)) as events:
        async for event in events:
            match event:
                case TranscriptDelta() if event.text:
                    yield event.text
                case TurnDone():
                    yield event
                    return
    raise StageFailedError("The turn ended without a result.")


def _one_clip(pcm: np.ndarray, model: SpeechModel) -> list[np.ndarray]:
    speech = speech_only(pcm, model)
    return [speech] if len(speech) else []


def _turn(
    clips: tuple[AudioPart, ...],
    *,
    language: str | None = None,
    hint: str | None = None,
    temperature: float = 0.0,
    in_detail: bool = False,
    translates: bool = False,
    flex: bool = False,
) -> TurnRequest:
    """
    Args:
        language: of the speech, by name or code. hint: words that may occur in it.
        in_detail, translates, flex: see TurnRequest.
    """
    instruction = [_INSTRUCTION]
    if language:
        instruction.append(f"The language is {language}.")
    if hint:
        instruction.append(f"These words may occur: {hint}")
    item = HistoryItem(
        key=new_id("key"), role="user", parts=(*clips, TextPart(" ".join(instruction)))
    )
    duration_s = sum(clip.duration_s for clip in clips)
    return TurnRequest(
        instructions="",
        history=(item,),
        voice="",
        wants_audio=False,
        max_output_tokens=max(_MIN_TOKENS, round(duration_s * _TOKENS_PER_S)),
        temperature=temperature,
        stateless=True,
        transcribes=True,
        in_detail=in_detail,
        translates=translates,
        flex=flex,
    )
