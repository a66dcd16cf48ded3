"""How far ahead of its listener a stream may get, and which streams pause.

Speech made ahead is lost when the user interrupts, and rounds are shorter without it; it also lasts
through bursts of other streams. A stream pauses above its high mark and resumes at its low one,
early enough for its next sound. The marks follow the measured round (the faster the rounds, the
later a stream can resume) and the user: streams of a user who never interrupts may get far ahead,
and yield when another stream is urgent.
"""

import math
from dataclasses import dataclass

import numpy as np

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import Bools, Floats, StageView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marks:
    """Buffers in seconds: a stream pauses above high_s and resumes at low_s.

    low_s: a float, or [n] under memory pressure.
    high_s: a float, or [n].
    max_s: a stream that has been paused for longer runs for a round.
    """

    low_s: float | Floats
    high_s: float | Floats
    max_s: float


def latency_s(round_s: float, config: PolicyConfig) -> float:
    """Returns the speech that a stream must have buffered at its next decode step.

    Until its next sound, either a whole chunk has to be made, or one step is missing of a chunk of
    which nothing is audio yet.
    """
    chunk_s = max(config.chunk_steps * round_s, (config.chunk_steps - 1) * config.step_s + round_s)
    return config.pipeline_s + chunk_s


def _in_time_s(round_s: float, config: PolicyConfig, headroom: float = 1.0) -> float:
    """Returns latency_s and the lateness of a resumed stream.

    headroom: share of a round's speech by which a stream catches up after a delay.
    """
    late_s = config.jitter_s + config.jitter_rounds * round_s / headroom
    return latency_s(round_s, config) + late_s


def pacing_marks(
    view: StageView, safe_s: float, config: PolicyConfig, *, crowded: bool = False
) -> Marks:
    """
    Args:
        safe_s: P_safe: below it a stream is urgent and never paused.
        crowded: a stream waits for memory, or KV that is to be loaded ahead of its request.
            Streams that hold much of it may then get further ahead, to where their utility
            (LiveServe eq. 1) is zero, and so end sooner. With config.runs_ahead_for_kv they always
            may, but only a crowded stage resumes those that have paused.
    """
    round_s = view.rates.round_s
    # A round as long as the speech it makes leaves no time to catch up: no mark is high enough.
    headroom = max(1.0 - round_s / config.step_s, 1e-9)
    low_s: float | Floats
    low_s = back_s = max(min(_in_time_s(round_s, config, headroom), config.max_low_s), safe_s)
    likely_s = config.min_gap_s / np.maximum(view.interrupts, config.min_gap_s / config.max_gap_s)
    # A stream flips twice each time it goes from one mark to the other and back.
    rare_s = 2.0 * np.count_nonzero(view.managed) * config.flip_s / config.flip_share
    high_s = back_s + np.maximum(likely_s, rare_s)
    if crowded or config.runs_ahead_for_kv:
        exposure = config.beta / config.alpha * view.occupancy * view.kv_tokens
        worth_s = config.p_safe_s * (1.0 + exposure)
        high_s = np.maximum(high_s, worth_s)
        if crowded:
            low_s = np.maximum(back_s, worth_s - max(config.min_gap_s, rare_s))
    return Marks(low_s=low_s, high_s=high_s, max_s=config.max_pause_s)


def yield_marks(view: StageView, safe_s: float, config: PolicyConfig) -> Marks:
    """Marks while others are urgent: a stream resumes just in time, and pauses soon after.

    Slow rounds delay the urgent streams, so these marks leave no time to catch up in them.
    """
    low_s = max(_in_time_s(view.rates.round_s, config), safe_s)
    # A stream that pauses within a chunk has made no new sound.
    high_s = low_s + config.chunk_steps * config.step_s
    return Marks(low_s=low_s, high_s=high_s, max_s=config.max_yield_s)


def lower(a: Marks, b: Marks) -> Marks:
    return Marks(
        low_s=np.minimum(a.low_s, b.low_s),
        high_s=np.minimum(a.high_s, b.high_s),
        max_s=min(a.max_s, b.max_s),
    )


def choose_paused(view: StageView, may_pause: Bools, marks: Marks) -> Bools:
    """Returns which of the streams that may pause do so."""
    if not np.count_nonzero(view.paused):
        return (view.buffered_s > marks.high_s) & may_pause
    pause = view.buffered_s > np.where(view.paused, marks.low_s, marks.high_s)
    pause &= may_pause
    too_long = view.since_s <= view.now_s - marks.max_s
    too_long &= view.paused
    pause &= ~too_long
    return pause


def keep_company(
    view: StageView, pause: Bools, has_kv: Bools, marks: Marks, config: PolicyConfig
) -> Bools:
    """Returns `pause` without the streams that resume early, because a round runs anyway.

    Most of a round's cost is that of its first stream. So paused streams with room for a chunk
    below their high mark resume with it: bursts coincide, and there are fewer rounds.
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


def next_resume_s(view: StageView, pause: Bools, marks: Marks) -> float:
    """Returns the time at which the first paused stream resumes if only time passes; inf: none."""
    which = pause.nonzero()[0]
    if not len(which):
        return math.inf
    low_s = marks.low_s[which] if isinstance(marks.low_s, np.ndarray) else marks.low_s
    left_s = float((view.buffered_s[which] - low_s).min())
    since_s = float(np.where(view.paused[which], view.since_s[which], view.now_s).min())
    return min(view.now_s + left_s, since_s + marks.max_s)
