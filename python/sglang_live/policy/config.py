"""Every constant of the policies, with its unit and the physical reason for its size."""

from dataclasses import dataclass, fields, replace

from sglang_live.policy.view import FRAME_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """One per stage: a stage further from the listener wants a longer pipeline_s.

    From a decode step to the ear:
        step_s: speech that one decode step is worth; a codec frame.
        chunk_steps: steps the next stage collects before it makes sound of them.
        pipeline_s: from a full chunk to the ear: vocoder, network, jitter buffer of the player.

    Urgency, LiveServe eqs. 1 to 3:
        p_safe_s: P_safe. Three frames of an unfinished chunk plus pipeline_s are not sound yet,
            so a stream with less than about this is about to fall silent.
        alpha: weight of one P_safe of speech that a barge-in would throw away.
        beta: weight of one KV token in a full pool. 0.005: 2000 tokens there are worth as much as
            ten P_safe of exposure. LiveServe tunes the ratio per stage.

    Pacing:
        jitter_rounds, jitter_s: by how much a returning stream may be late, in rounds and beside:
            by prefills, and by rounds that grow because others return with it.
        max_low_s: marks above it mean that the stage is too slow to pace; longer than replies are.
        min_gap_s, max_gap_s: from low to high mark, for callers who always and never interrupt;
            between them min_gap_s over how often they do. What is made ahead is wasted by a
            barge-in, and is what others' bursts cannot interrupt: with 0.3 s a second more is
            made ahead where at most 3 of 10 answers are interrupted.
        flip_s: what one hold or return costs in tensor work.
        flip_share: share of the time that all flips together may take; widens the gap when
            streams are many.
        company_share: streams come back early to share a round if one more costs no larger share
            of it.
        max_pause_s: a held stream runs for one round after it. Its telemetry may be wrong.

    Yielding to the urgent:
        saturated: in a stage that computes for more than this share of the time one yields to
            those alone who have not sounded: they need few rounds. It has no time to give away, and
            small rounds cost more for each stream in them.
        max_yield_s: as max_pause_s, for streams that sit out for others.
        yield_rounds: rounds for which somebody typically stays urgent: the first two chunks.

    Prefill beside decode:
        chunk_tokens: the engine's own prefill chunk; a larger budget is no budget.
        min_chunk_tokens: below it the fixed cost of a prefill round outweighs its work.
        max_defer_s: how long a prefill, and each next slice of it, may wait for the sake of
            decodes. A quarter of a second more before an answer is noticed less than an answer
            that breaks off.
        short_rounds: a prefill that takes no longer than so many decode rounds waits for one at
            most. It has to be computed in any case, and is as if rounds were a little longer.
        min_prefill_share: a slice that waited so long may take this share of that time, or of the
            time for which a listener has waited already, so that prompts are computed also when
            decodes never have time to spare.
        may_pause_prefill: the engine can run decodes between two chunks of a prompt, as SGLang
            does by its prefill_decode_interval. Otherwise slices would only cost more.

    Long prompts:
        slice_s: of one, but min_chunk_tokens at least; who comes meanwhile waits for half of it
            on average.
        long_slices: a prompt of no more slices is computed in one go.
        max_preempt_s: shorter prompts pass a half-prefilled one for so long, then a slice of it
            is computed: it has a sixth of the time, whatever comes.

    Admission:
        max_bypass_s: a stream that does not fit is passed over no longer than this.
        max_wait_s: then a waiting stream counts as U1 if it is of class U2, or nobody listens to
            it; and if it waits for memory pacing ceases, so that others end and free it.

    Deadline, VoxServe:
        critical_s: a stream this close to its deadline risks missing it.
        n_startup_max: streams at once on their way to their first sound.
        max_startup_s: a stream that takes longer is stuck, and blocks no others.
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
    saturated: float = 0.9
    company_share: float = 0.3
    max_pause_s: float = 10.0
    max_yield_s: float = 2.0
    yield_rounds: float = 16.0
    chunk_tokens: int = 2048
    min_chunk_tokens: int = 64
    max_defer_s: float = 0.25
    short_rounds: float = 1.5
    min_prefill_share: float = 0.2
    may_pause_prefill: bool = False
    slice_s: float = 0.05
    long_slices: float = 4.0
    max_preempt_s: float = 0.25
    max_bypass_s: float = 2.0
    max_wait_s: float = 10.0
    critical_s: float = 1.0
    n_startup_max: int = 8
    max_startup_s: float = 5.0

    def __post_init__(self) -> None:
        may_be_zero = ("pipeline_s", "beta", "jitter_rounds", "jitter_s", "flip_s", "yield_rounds")
        if not isinstance(self.may_pause_prefill, bool):
            raise ValueError("policy config: may_pause_prefill must be true or false")
        for name in (f.name for f in fields(self) if f.name != "may_pause_prefill"):
            value = getattr(self, name)
            if not 0 <= value < float("inf") or (value == 0 and name not in may_be_zero):
                raise ValueError(f"policy config: {name} must be positive, got {value}")
        for name in ("chunk_steps", "chunk_tokens", "min_chunk_tokens", "n_startup_max"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"policy config: {name} must be a whole number")
        for low, high in (
            ("min_gap_s", "max_gap_s"),
            ("p_safe_s", "max_low_s"),
            ("min_chunk_tokens", "chunk_tokens"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"policy config: {low} must not be above {high}")


# Both engines can park a prefill.
TALKER = PolicyConfig(may_pause_prefill=True)
# Its tokens have the talker before them, which collects a chunk of its own on the way to the ear.
# And they are cheap beside frames: three times as much ahead lasts over longer prefills.
THINKER = replace(
    TALKER,
    pipeline_s=TALKER.pipeline_s + TALKER.chunk_steps * FRAME_S,
    p_safe_s=TALKER.p_safe_s + TALKER.chunk_steps * FRAME_S,
    min_gap_s=3 * TALKER.min_gap_s,
)
