"""What was said, in writing: the model that answers also writes down, beside the conversation.

In: audio. Out: text as it comes; no text for audio without speech. There is no recogniser beside
the model; it is asked for the words of a clip in a turn that leaves no trace.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from sglang_live.core import (
    AudioPart,
    HistoryItem,
    TextPart,
    TranscriptDelta,
    TurnDone,
    TurnRequest,
    Usage,
)
from sglang_live.errors import StageFailedError
from sglang_live.gateway.ids import new_id
from sglang_live.interaction.presence import speech_only
from sglang_live.interaction.silero import SpeechModel
from sglang_live.orchestrator.session import VoiceSession

# As Qwen3-Omni was taught to be asked.
_ASK = "Transcribe the audio into text."
# A minute of fast speech has some 250 words.
_TOKENS_PER_S = 10
_LEAST_TOKENS = 64


async def transcribe(
    session: VoiceSession,
    audio: AudioPart,
    speech_model: SpeechModel,
    *,
    language: str | None = None,
    hint: str | None = None,
    temperature: float = 0.0,
) -> AsyncGenerator[str | Usage, None]:
    """Yield the text in pieces, then what it cost.

    Args:
        speech_model: finds the speech in it; the rest is not shown to a model that would make
            words of it.
        language: of the speech, by name or code. hint: words that may occur in it.
    Raises:
        LiveError: the turn failed.
    """
    said = await asyncio.to_thread(speech_only, audio.pcm, speech_model)
    if not len(said):
        yield Usage()
        return
    audio = audio if said is audio.pcm else AudioPart(said)
    asked = [_ASK]
    if language:
        asked.append(f"The language is {language}.")
    if hint:
        asked.append(f"These words may occur: {hint}")
    item = HistoryItem(key=new_id("key"), role="user", parts=(audio, TextPart(" ".join(asked))))
    turn = TurnRequest(
        instructions="",
        history=(item,),
        voice="",
        wants_audio=False,
        max_output_tokens=max(_LEAST_TOKENS, round(audio.duration_s * _TOKENS_PER_S)),
        temperature=temperature,
        stateless=True,
    )
    async with aclosing(session.respond(turn)) as events:
        async for event in events:
            match event:
                case TranscriptDelta() if event.text:
                    yield event.text
                case TurnDone():
                    yield event.usage
                    return
    raise StageFailedError("The turn ended without a result.")
