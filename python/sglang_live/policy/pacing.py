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

from sglang_live.policy.stage import StageConstants
from sglang_live.policy.urgency import UrgencyConfig, worth_s
from sglang_live.policy.view import Bools, Floats, StageView
from sglang_live.settings import NonNegative, Positive, Settings, Switch


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingConfig(Settings):
    """
    max_low_s: low marks above it mean that the stage is too slow to pace; longer than responses
        are.
    min_gap_s, max_gap_s: from low to high mark, for users who always and never interrupt; in
        between it is min_gap_s over the interruption rate. Speech made ahead is wasted by a
        barge-in, and lasts through bursts of other streams: with 0.3 s, one more second is made
        ahead where at most 3 of 10 responses are interrupted.
    flip_s: tensor work of one pause or resume.
    flip_share: share of the time that all flips together may take; widens the gap where there are
        many streams.
    company_share: paused streams resume early to share a round if one more stream costs no larger
        share of it.
    max_pause_s: a paused stream runs for one round after it, because its telemetry may be wrong.
    runs_ahead_for_kv: streams that hold much KV of a full pool get further ahead also before one
        waits for memory: those that have run ahead by then free their KV sooner.
    interval_steps: least time between two decode rounds of a stage that shares its device, in steps
        of speech. Streams then advance at 2.7 times the speed of speech at most, which is enough to
        get ahead of the listener.
    """

    max_low_s: Positive = 30.0
    min_gap_s: Positive = 0.3
    max_gap_s: Positive = 10.0
    flip_s: NonNegative = 2e-4
    flip_share: Positive = 0.05
    company_share: Positive = 0.3
    max_pause_s: Positive = 10.0
    runs_ahead_for_kv: Switch = False
    interval_steps: NonNegative = 0.375

    def check(self) -> None:
        self.not_above("min_gap_s", "max_gap_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldConfig(Settings):
    """Of streams that yield to urgent ones.

    saturated: in a stage that computes for a larger share of the time no stream yields. What they
        would make later has no time then: small rounds cost more per stream, and the next burst
        finds their buffers short.
    max_yield_s: as max_pause_s, for streams that pause for urgent ones.
    yield_rounds: rounds for which a stream typically stays urgent: the first two chunks.
    """

    saturated: Positive = 0.7
    max_yield_s: Positive = 2.0
    yield_rounds: NonNegative = 16.0


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


def resume_mark_s(
    view: StageView, safe_s: float, stage: StageConstants, config: PacingConfig
) -> float:
    """Returns the buffer at which a stream resumes, if it is not held back for its memory.

    Args:
        safe_s: P_safe: below it a stream is urgent and never paused.
    """
    round_s = view.rates.round_s
    # A round as long as the speech it makes leaves no time to catch up: no mark is high enough.
    headroom = max(1.0 - round_s / stage.step_s, 1e-9)
    return max(min(stage.in_time_s(round_s, headroom), config.max_low_s), safe_s)


def pacing_marks(
    view: StageView,
    safe_s: float,
    stage: StageConstants,
    config: PacingConfig,
    urgency: UrgencyConfig,
    *,
    crowded: bool = False,
) -> Marks:
    """
    Args:
        safe_s: as for resume_mark_s.
        crowded: a stream waits for memory, or KV that is to be loaded ahead of its request.
            Streams that hold much of it may then get further ahead, to where their utility
            (LiveServe eq. 1) is zero, and so end sooner. With config.runs_ahead_for_kv they always
            may, but only a crowded stage resumes those that have paused.
    """
    resume_s = resume_mark_s(view, safe_s, stage, config)
    low_s: float | Floats = resume_s
    of_user_s = config.min_gap_s / np.maximum(view.interrupts, config.min_gap_s / config.max_gap_s)
    # A stream flips twice each time it goes from one mark to the other and back.
    of_flips_s = 2.0 * np.count_nonzero(view.managed) * config.flip_s / config.flip_share
    high_s = resume_s + np.maximum(of_user_s, of_flips_s)
    if crowded or config.runs_ahead_for_kv:
        worthwhile_s = worth_s(view, urgency)
        high_s = np.maximum(high_s, worthwhile_s)
        if crowded:
            low_s = np.maximum(resume_s, worthwhile_s - max(config.min_gap_s, of_flips_s))
    return Marks(low_s=low_s, high_s=high_s, max_s=config.max_pause_s)


def yield_marks(
    view: StageView, safe_s: float, stage: StageConstants, config: YieldConfig
) -> Marks:
    """Marks while others are urgent: a stream resumes just in time, and pauses soon after.

    Slow rounds delay the urgent streams, so these marks leave no time to catch up in them.
    """
    low_s = max(stage.in_time_s(view.rates.round_s), safe_s)
    # A stream that pauses within a chunk has made no new sound.
    high_s = low_s + stage.chunk_s
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
    view: StageView,
    pause: Bools,
    has_kv: Bools,
    marks: Marks,
    stage: StageConstants,
    config: PacingConfig,
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
    joins = view.buffered_s <= marks.high_s - stage.chunk_s
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


def decode_interval_s(
    view: StageView, has_kv: Bools, stage: StageConstants, config: PacingConfig, *, crowded: bool
) -> float:
    """Returns the least time from a decode round to the next one; 0: there is none.

    A decode round costs nearly the same for one stream as for ten, and it delays whatever another
    stage launches behind it: a prompt, a chunk of audio. An engine that decodes as fast as it can
    makes many small rounds, and keeps a round of its own in front of the others' work. With an
    interval each round has more streams, and the device is free in between.

    Only streams that are heard have one: for the others more tokens per second are better, and
    there is no time in which theirs are needed.

    Args:
        has_kv: bool [n], streams that could step.
        crowded: others wait for the memory that these hold. Unless a later stage needs the device,
            they are then computed as fast as it can, so that they end.
    """
    if not config.interval_steps or (crowded and not view.peer_urgent):
        return 0.0
    # Free indices have no KV.
    decodes = has_kv & (view.kv_tokens > 0)
    unheard = decodes & ~(view.managed & ~np.isnan(view.buffered_s))
    return 0.0 if np.count_nonzero(unheard) else config.interval_steps * stage.step_s
