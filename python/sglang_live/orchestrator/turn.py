"""One spoken turn, from history to sound. Read this first.

The thinker writes, the talker speaks what is written so far, the vocoder makes it audible: the
caller hears the beginning before the thinker knows the end.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

from sglang_live.aio import merge
from sglang_live.core import (
    AudioDelta,
    HistoryItem,
    TextPart,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
    Usage,
)
from sglang_live.orchestrator.stage_jobs import Speech, Thought
from sglang_live.orchestrator.stage_links import StageLinks
from sglang_live.orchestrator.turn_control import Steering
from sglang_live.telemetry.trace import TurnTrace


async def run_turn(
    turn: TurnRequest, stages: StageLinks, trace: TurnTrace, steering: Steering
) -> AsyncIterator[TurnEvent]:
    """Yield text and sound as they come, then TurnDone.

    Leaving early, by an error or by closing the iterator, cancels the turn in every stage. An
    interruption cancels it in talker and vocoder only: their part is over, the thinker's soon is.
    """
    async with (
        stages.thinker.open(turn) as thought,
        stages.talker.open(turn) as speech,
        stages.vocoder.open(turn) as voice,
    ):
        steering.take(thought, speech, voice)

        async def write() -> AsyncIterator[TurnEvent]:
            n_tokens = 0
            async for tokens in thought.tokens():
                trace.mark("thinker_first_token")
                n_tokens += len(tokens.ids)
                yield TranscriptDelta(tokens.text, n_tokens)
                await speech.write(tokens.ids)
            trace.mark("thinker_done")
            await speech.end_text()

        async def speak() -> AsyncIterator[TurnEvent]:
            async for codes in speech.frames():
                trace.mark("talker_first_frame")
                steering.spoke(speech.n_frames)
                await voice.decode(codes)
            if not steering.interrupted:
                trace.mark("talker_done")
            await voice.end()
            return
            yield  # a generator like the others; it has nothing for the caller

        async def sound() -> AsyncIterator[TurnEvent]:
            async for pcm in voice.pcm():
                trace.mark("first_audio")
                yield AudioDelta(pcm)

        parts = (write(), speak(), sound()) if turn.wants_audio else (write(),)
        async for event in merge(*parts):
            if not (steering.interrupted and isinstance(event, AudioDelta)):
                yield event
        trace.mark("turn_done")
        done = _turn_done(turn, thought, speech, trace)
        if steering.interrupted:
            # What nobody waits for any more is not called either.
            done = replace(done, status="interrupted", reason=None, function_calls=())
        yield done


def _turn_done(turn: TurnRequest, thought: Thought, speech: Speech, trace: TurnTrace) -> TurnDone:
    done = thought.done
    # A talker that never ends is cut by a bound that follows from its text.
    hit_limit = done.finish == "length" or speech.cut
    return TurnDone(
        status="incomplete" if hit_limit else "completed",
        reason="max_output_tokens" if hit_limit else None,
        item=HistoryItem(
            key=thought.item_key,
            role="assistant",
            parts=(TextPart(done.text),),
            token_ids=tuple(done.ids),
        ),
        usage=Usage(
            input_text_tokens=done.n_prompt - done.n_audio,
            input_audio_tokens=done.n_audio,
            cached_tokens=done.n_cached,
            output_text_tokens=len(done.ids),
            output_audio_tokens=speech.n_frames,
        ),
        n_frames=speech.n_frames,
        function_calls=tuple(done.function_calls),
        spoken=speech.ended or not turn.wants_audio,
        gone=tuple(done.gone),
        trace=dict(trace.marks),
    )
