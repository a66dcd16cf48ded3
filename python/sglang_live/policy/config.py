"""Constants of the policies, with their units and the physical reasons for their sizes."""

from dataclasses import dataclass, fields, replace

from sglang_live.policy.view import FRAME_S

_SWITCHES = ("may_pause_prefill", "runs_ahead_for_kv")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Constants of one stage. The longer the way from a stage to the listener, the larger its
    pipeline_s.

    From a decode step to the listener:
        step_s: speech of one decode step; of a talker, as its model says (TalkerModel).
        chunk_steps: steps of which the next stage makes one chunk of audio; as step_s.
        pipeline_s: from a full chunk to its sound: vocoder, network, jitter buffer of the player.

    Urgency, LiveServe eqs. 1 to 3:
        p_safe_s: P_safe. Three frames of an unfinished chunk and pipeline_s are not audio yet, so
            a stream with a buffer below about this is about to fall silent.
        alpha: weight of one P_safe of speech that a barge-in would waste.
        beta: weight of one KV token in a full pool. With 0.005, 2000 tokens there have the weight
            of ten P_safe of exposure. LiveServe tunes the ratio per stage.

    Pacing:
        jitter_rounds, jitter_s: how late a resumed stream may be, in rounds and in addition: by
            prefills, and by rounds that are longer because other streams resume with it.
        max_low_s: low marks above it mean that the stage is too slow to pace; longer than
            responses are.
        min_gap_s, max_gap_s: from low to high mark, for users who always and never interrupt; in
            between it is min_gap_s over the interruption rate. Speech made ahead is wasted by a
            barge-in, and lasts through bursts of other streams: with 0.3 s, one more second is
            made ahead where at most 3 of 10 responses are interrupted.
        flip_s: tensor work of one pause or resume.
        flip_share: share of the time that all flips together may take; widens the gap where
            there are many streams.
        company_share: paused streams resume early to share a round if one more stream costs no
            larger share of it.
        max_pause_s: a paused stream runs for one round after it, because its telemetry may be
            wrong.
        runs_ahead_for_kv: streams that hold much KV of a full pool get further ahead also before
            one waits for memory: those that have run ahead by then free their KV sooner.

    Yielding to urgent streams:
        saturated: in a stage that computes for a larger share of the time no stream yields. What
            they would make later has no time then: small rounds cost more per stream, and the
            next burst finds their buffers short.
        max_yield_s: as max_pause_s, for streams that pause for urgent ones.
        yield_rounds: rounds for which a stream typically stays urgent: the first two chunks.

    Decode rounds of stages that share a device:
        interval_steps: least time between two of them, in steps of speech. Streams then advance at
            2.7 times the speed of speech at most, which is enough to get ahead of the listener.

    Prefill beside decode:
        chunk_tokens: the engine's own prefill chunk; a larger budget has no effect.
        min_chunk_tokens: below it the fixed cost of a prefill round outweighs its work.
        max_defer_s: how long a prefill, and each next slice of it, may wait for decodes. A quarter
            of a second more before a response is noticed less than a gap within one.
        max_defer_unheard_s: as max_defer_s, for prompts without a listener.
        defer_costs: nor longer than this multiple of what it takes: a prefill that is short beside
            its wait gives the decodes little, and its user waits for both.
        short_rounds: a prefill that takes at most this many decode rounds waits for one at most.
            It has to be computed in any case, and its effect is that of slightly longer rounds.
        min_prefill_share: share of the time it has waited that a deferred slice may take, or of
            the time that its listener has waited already, so that prompts are computed also where
            decodes never have time to spare.
        unnoticed_s: prefills that begin in one round may take this long together. Of prompts with a
            listener also where those of later stages have no time to spare: pipeline_s covers it,
            and a first sound waits. Of prompts without one no more: a request may come meanwhile.
        may_pause_prefill: the engine can run decodes between two chunks of a prompt, as SGLang
            does by its prefill_decode_interval. Otherwise slices only add cost.

    Long prompts:
        slice_overhead: share of a slice that the fixed cost of a prefill takes.
        min_slice_s, max_slice_s: bounds of a slice's duration, which has min_chunk_tokens at least;
            a request that comes meanwhile waits for half of it on average.
        long_slices: a prompt of at most this many slices is computed in one go.
        max_preempt_s: how long shorter prompts pass a half-prefilled one before a slice of it is
            computed: it always has an eleventh of the time at least.

    Admission:
        max_bypass_s: how long smaller streams may pass a stream that does not fit.
        max_wait_s: a stream of U2, or one without a listener, that has waited for longer counts
            as U1; and if it waits for memory, pacing ceases, so that other streams end and free
            it.

    Best effort:
        slack_share: share of the listeners' slack that a round with best effort in it may take.
        most_round_s: most that a round with best effort in it may take, also without listeners: one
            may come in any round, and waits for its end.
        first_sound_s: time in which a stream's first chunk is made beside best effort.
        patience_s: best effort that has waited for longer gets a step, unless a stream may fall
            silent; then it gets one after max_pause_s.
        overdue_turns: of streams that wait for too long at once, this share gets a step in a round.
        first_error: error of predictions, before it is measured, where there are no listeners.
        growth_tokens: that each best-effort stream can decode beside the KV of idle sessions before
            one of them is retracted: a prefill for some dozens of decode rounds.
        cap_streams: BROS's smallest cap on best-effort streams in a batch.

    Deadline, VoxServe:
        critical_s: a stream with a smaller buffer risks missing its deadline.
        n_startup_max: streams at once on their way to their first sound.
        max_startup_s: a stream that takes longer is stuck, and does not count among them.
    """

    step_s: float = FRAME_S
    chunk_steps: int = 4
    pipeline_s: float = 0.25
    p_safe_s: float = 0.5
    alpha: float = 1.0
    beta: float = 0.005
    jitter_rounds: float = 4.0
    jitter_s: float = 0.05
    max_low_s: float = 30.0
    min_gap_s: float = 0.3
    max_gap_s: float = 10.0
    flip_s: float = 2e-4
    flip_share: float = 0.05
    saturated: float = 0.7
    company_share: float = 0.3
    max_pause_s: float = 10.0
    runs_ahead_for_kv: bool = False
    max_yield_s: float = 2.0
    yield_rounds: float = 16.0
    interval_steps: float = 0.375
    chunk_tokens: int = 2048
    min_chunk_tokens: int = 64
    max_defer_s: float = 0.25
    max_defer_unheard_s: float = 1.0
    defer_costs: float = 1.0
    short_rounds: float = 1.5
    min_prefill_share: float = 0.2
    unnoticed_s: float = 0.2
    may_pause_prefill: bool = False
    slice_overhead: float = 0.33
    min_slice_s: float = 0.025
    max_slice_s: float = 0.1
    long_slices: float = 4.0
    max_preempt_s: float = 0.25
    max_bypass_s: float = 2.0
    max_wait_s: float = 10.0
    slack_share: float = 0.75
    most_round_s: float = 0.1
    first_sound_s: float = 0.3
    patience_s: float = 2.0
    overdue_turns: int = 8
    first_error: float = 0.5
    growth_tokens: int = 64
    cap_streams: int = 128
    critical_s: float = 1.0
    n_startup_max: int = 8
    max_startup_s: float = 5.0

    def __post_init__(self) -> None:
        may_be_zero = (
            *("pipeline_s", "beta", "jitter_rounds", "jitter_s", "flip_s", "yield_rounds"),
            "interval_steps",
        )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"policy config: {name} must be true or false")
        for name in (f.name for f in fields(self) if f.name not in _SWITCHES):
            value = getattr(self, name)
            if not 0 <= value < float("inf") or (value == 0 and name not in may_be_zero):
                raise ValueError(f"policy config: {name} must be positive, got {value}")
        whole = (
            *("chunk_steps", "chunk_tokens", "min_chunk_tokens", "n_startup_max"),
            *("overdue_turns", "growth_tokens", "cap_streams"),
        )
        for name in whole:
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"policy config: {name} must be a whole number")
        for low, high in (
            ("min_gap_s", "max_gap_s"),
            ("p_safe_s", "max_low_s"),
            ("min_chunk_tokens", "chunk_tokens"),
            ("min_slice_s", "max_slice_s"),
            ("patience_s", "max_pause_s"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"policy config: {low} must not be above {high}")


# Both engines can pause a prefill.
TALKER = PolicyConfig(may_pause_prefill=True)
# Between its tokens and the listener is also the talker, which makes a chunk of its own. Text
# tokens are cheap beside frames: three times as much ahead lasts through longer prefills, and where
# sessions fill the pool, text that may never be spoken costs less than KV that is held for longer.
THINKER = replace(
    TALKER,
    pipeline_s=TALKER.pipeline_s + TALKER.chunk_steps * FRAME_S,
    p_safe_s=TALKER.p_safe_s + TALKER.chunk_steps * FRAME_S,
    min_gap_s=3 * TALKER.min_gap_s,
    runs_ahead_for_kv=True,
)
