"""How far ahead of its listener a stream may get, and who sits out.

What is made ahead is lost when the caller interrupts, and a round is shorter without it; it also
is what lasts when others come in a burst. A stream pauses above its high mark and comes back at
its low one, early enough for its next sound. The marks follow the measured round (the faster the
rounds, the later one can come back) and the caller: who never interrupts may get far ahead, and
yields when somebody else is urgent.
"""

import math
from dataclasses import dataclass

import numpy as np

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import StageView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marks:
    """Seconds ahead of the consumer: a stream leaves above high_s and comes back at low_s.

    low_s: a float, or [n] under memory pressure.
    high_s: a float, or [n], of each caller.
    max_s: a stream that sat out for longer runs for a round.
    """

    low_s: float | np.ndarray
    high_s: float | np.ndarray
    max_s: float


def latency_s(round_s: float, config: PolicyConfig) -> float:
    """From a stream's next decode step to its next sound, in speech that has to be there already.

    Either a whole chunk has yet to be made, or all but one step of it is made and no sound yet.
    """
    chunk_s = max(config.chunk_steps * round_s, (config.chunk_steps - 1) * config.step_s + round_s)
    return config.pipeline_s + chunk_s


def _in_time_s(round_s: float, config: PolicyConfig, headroom: float = 1.0) -> float:
    """headroom: share of a round's speech by which it gains on the listener after a delay."""
    late_s = config.jitter_s + config.jitter_rounds * round_s / headroom
    return latency_s(round_s, config) + late_s


def pacing_marks(
    view: StageView, safe_s: float, config: PolicyConfig, *, crowded: bool = False
) -> Marks:
    """
    Args:
        safe_s: P_safe: below it a stream is urgent and never sits out.
        crowded: somebody waits for memory. Streams that hold much of it may then get further
            ahead, to where their utility (LiveServe eq. 1) is zero, and so end sooner.
    """
    round_s = view.rates.round_s
    # A round as long as the speech it makes leaves no room to catch up: no mark is high enough.
    headroom = max(1.0 - round_s / config.step_s, 1e-9)
    low_s = max(min(_in_time_s(round_s, config, headroom), config.max_low_s), safe_s)
    likely_s = config.min_gap_s / np.maximum(view.interrupts, config.min_gap_s / config.max_gap_s)
    # Two flips each time a stream goes from one mark to the other and back.
    rare_s = 2.0 * np.count_nonzero(view.managed) * config.flip_s / config.flip_share
    high_s = low_s + np.maximum(likely_s, rare_s)
    if crowded:
        exposure = config.beta / config.alpha * view.occupancy * view.kv_tokens
        worth_s = config.p_safe_s * (1.0 + exposure)
        high_s = np.maximum(high_s, worth_s)
        low_s = np.maximum(low_s, worth_s - max(config.min_gap_s, rare_s))
    return Marks(low_s=low_s, high_s=high_s, max_s=config.max_pause_s)


def yield_marks(
    view: StageView, safe_s: float, config: PolicyConfig, *, n_chunks: int = 1
) -> Marks:
    """While others are urgent: back just in time, however slow the rounds, and out soon after.

    Slow rounds are what the urgent suffer from, so these marks have no room to catch up in them.
    """
    low_s = max(_in_time_s(view.rates.round_s, config), safe_s)
    # A chunk above: who leaves earlier has come back without a new sound.
    high_s = low_s + n_chunks * config.chunk_steps * config.step_s
    return Marks(low_s=low_s, high_s=high_s, max_s=config.max_yield_s)


def lower(a: Marks, b: Marks) -> Marks:
    return Marks(
        low_s=np.minimum(a.low_s, b.low_s),
        high_s=np.minimum(a.high_s, b.high_s),
        max_s=min(a.max_s, b.max_s),
    )


def choose_paused(view: StageView, may_pause: np.ndarray, marks: Marks) -> np.ndarray:
    """bool [n], of those who may."""
    if not np.count_nonzero(view.paused):
        return (view.buffered_s > marks.high_s) & may_pause
    pause = view.buffered_s > np.where(view.paused, marks.low_s, marks.high_s)
    pause &= may_pause
    too_long = view.since_s <= view.now_s - marks.max_s
    too_long &= view.paused
    pause &= ~too_long
    return pause


def keep_company(
    view: StageView, pause: np.ndarray, has_kv: np.ndarray, marks: Marks, config: PolicyConfig
) -> np.ndarray:
    """pause without those who come back early, because a round runs anyway.

    Most of a round's cost is there for the first stream in it. Streams with room for a chunk
    below their high mark take the ride; so bursts fall together, and rounds are fewer.
    """
    per_stream_s = view.rates.round_s_per_stream
    if per_stream_s > config.company_share * view.rates.round_s:
        return pause
    runs = has_kv & ~pause
    runs &= view.managed
    if not np.count_nonzero(runs):
        return pause
    joins = view.buffered_s <= marks.high_s - config.chunk_steps * config.step_s
    return pause & ~(joins & view.paused)


def next_return_s(view: StageView, pause: np.ndarray, marks: Marks) -> float:
    """When time alone could bring the first of them back."""
    which = pause.nonzero()[0]
    if not len(which):
        return math.inf
    low_s = marks.low_s[which] if np.ndim(marks.low_s) else marks.low_s
    left_s = float((view.buffered_s[which] - low_s).min())
    since_s = float(np.where(view.paused[which], view.since_s[which], view.now_s).min())
    return min(view.now_s + left_s, since_s + marks.max_s)
