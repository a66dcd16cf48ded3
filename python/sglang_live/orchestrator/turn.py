"""One spoken turn, from history to audio.

In: a TurnRequest. Out: TurnEvents. The thinker generates text, the talker codec frames of the text
so far, the vocoder their audio: the user hears the beginning before the text is complete.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace

from sglang_live.aio import merge
from sglang_live.core import (
    FRAME_S,
    AudioDelta,
    HistoryItem,
    TextDone,
    TextPart,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
    Usage,
)
from sglang_live.orchestrator.moves import NO_MOVE, Move
from sglang_live.orchestrator.stage_jobs import (
    OwnVoiceJob,
    ScriptJob,
    TalkerJob,
    TextJob,
    ThinkerJob,
    VocoderJob,
)
from sglang_live.orchestrator.stage_links import StageLinks
from sglang_live.orchestrator.turn_control import TurnControl
from sglang_live.telemetry.trace import TurnTrace


async def run_turn(
    turn: TurnRequest,
    stages: StageLinks,
    trace: TurnTrace,
    control: TurnControl,
    move: Move = NO_MOVE,
) -> AsyncGenerator[TurnEvent, None]:
    """Yield text and audio as they come, then TurnDone.

    An error, or closing the iterator early, cancels the turn in every stage. An interruption
    cancels it in talker and vocoder only: the thinker ends its job by itself and keeps the KV.
    The loss of a replica is an error only if `move` finds no other one: the jobs below then go on
    there, with no token, frame or sample missing or twice.
    """
    async with (
        stages.thinker.open(turn, move) as thinker,
        stages.talker.open(turn, move) as talker,
        stages.vocoder.open(turn, move) as vocoder,
    ):
        control.attach(thinker, talker, vocoder)

        async def generate() -> AsyncGenerator[TurnEvent, None]:
            n_tokens = 0
            if turn.begun is not None and turn.begun.ids:
                n_tokens = len(turn.begun.ids)
                await talker.write(list(turn.begun.ids), turn.begun.said)
            async for tokens in thinker.tokens():
                trace.mark("thinker_first_token")
                n_tokens += len(tokens.ids)
                yield TranscriptDelta(tokens.text, n_tokens)
                if isinstance(talker, OwnVoiceJob):
                    talker.speak(tokens.codes, tokens.spoken)
                await talker.write(tokens.ids, tokens.text)
            trace.mark("thinker_done")
            if turn.wants_audio:
                yield TextDone(n_tokens)
            await talker.end_text()

        async def speak() -> None:
            async for codes in talker.frames():
                trace.mark("talker_first_frame")
                control.frames_came(talker.n_frames)
                await vocoder.decode(codes)
            if not control.interrupted:
                trace.mark("talker_done")
            await vocoder.end()

        async def decode() -> AsyncGenerator[TurnEvent, None]:
            async for audio in vocoder.audio():
                trace.mark("first_audio")
                yield replace(audio, spoken=(*audio.spoken, *talker.take_marks()))

        parts = (generate(), speak(), decode()) if turn.wants_audio else (generate(),)
        async for event in merge(*parts):
            if not (control.interrupted and isinstance(event, TextDone | AudioDelta)):
                yield event
        trace.mark("turn_done")
        done = _turn_done(turn, thinker, talker, vocoder, trace)
        if control.interrupted:
            # The user did not wait for these calls, so the client must not make them.
            done = replace(done, status="interrupted", reason=None, function_calls=())
        yield done


def _turn_done(
    turn: TurnRequest,
    thinker: ThinkerJob | ScriptJob,
    talker: TalkerJob | TextJob | OwnVoiceJob,
    vocoder: VocoderJob,
    trace: TurnTrace,
) -> TurnDone:
    done = thinker.done
    assert done is not None, "its tokens have ended"
    # A talker that misses its end stops at a bound that follows from its text.
    hit_limit = done.finish == "length" or talker.cut
    # Speech that is read from text has no codes.
    n_frames = talker.n_frames or round(vocoder.audio_s / FRAME_S)
    n_codes = talker.n_codes if isinstance(talker, OwnVoiceJob) else 0
    return TurnDone(
        status="incomplete" if hit_limit else "completed",
        reason="max_output_tokens" if hit_limit else None,
        item=HistoryItem(
            key=turn.item_key,
            role="assistant",
            parts=(TextPart(done.text),),
            token_ids=tuple(done.ids),
        ),
        usage=Usage(
            input_text_tokens=done.n_prompt - done.n_audio - done.n_image - done.n_video,
            input_audio_tokens=done.n_audio,
            input_image_tokens=done.n_image,
            input_video_tokens=done.n_video,
            cached_tokens=done.n_cached,
            # Text that no thinker generated has no tokens but the talker's.
            output_text_tokens=len(done.ids) - n_codes or talker.n_read,
            output_audio_tokens=n_codes or n_frames,
        ),
        n_frames=n_frames,
        function_calls=tuple(done.function_calls),
        spoken=talker.ended or not turn.wants_audio,
        gone=tuple(done.gone),
        heard=tuple(done.heard),
        trace=dict(trace.marks),
        shares=tuple(done.shares),
    )
