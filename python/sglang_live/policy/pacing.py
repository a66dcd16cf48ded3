"""How far ahead of its listener a stream may get, and which streams pause.

Speech made ahead is lost when the user interrupts, and rounds are shorter without it. A stream
pauses above its high mark and resumes at its low one, early enough for its next sound. The marks
follow the measured round: the faster the rounds, the later a stream can resume.
"""

import math
from dataclasses import dataclass

import numpy as np

from sglang_live.policy.stage import StageConstants
from sglang_live.policy.urgency import UrgencyConfig, worth_s
from sglang_live.policy.view import Bools, Floats, StageView
from sglang_live.settings import Positive, Settings, Switch


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingConfig(Settings):
    """
    max_low_s: low marks above it mean that the stage is too slow to pace; longer than responses
        are.
    gap_s: from low to high mark.
    max_pause_s: a paused stream runs for one round after it, because its telemetry may be wrong.
    runs_ahead_for_kv: streams that hold much KV of a full pool get further ahead also before one
        waits for memory: those that have run ahead by then free their KV sooner.
    """

    max_low_s: Positive = 30.0
    gap_s: Positive = 0.3
    max_pause_s: Positive = 10.0
    runs_ahead_for_kv: Switch = False


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
    return max(min(stage.in_time_s(round_s, view.late_s, headroom), config.max_low_s), safe_s)


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
    high_s: float | Floats = resume_s + config.gap_s
    if crowded or config.runs_ahead_for_kv:
        worthwhile_s = worth_s(view, urgency)
        high_s = np.maximum(high_s, worthwhile_s)
        if crowded:
            low_s = np.maximum(resume_s, worthwhile_s - config.gap_s)
    return Marks(low_s=low_s, high_s=high_s, max_s=config.max_pause_s)


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


def next_resume_s(view: StageView, pause: Bools, marks: Marks) -> float:
    """Returns the time at which the first paused stream resumes if only time passes; inf: none."""
    which = pause.nonzero()[0]
    if not len(which):
        return math.inf
    low_s = marks.low_s[which] if isinstance(marks.low_s, np.ndarray) else marks.low_s
    left_s = float((view.buffered_s[which] - low_s).min())
    since_s = float(np.where(view.paused[which], view.since_s[which], view.now_s).min())
    return min(view.now_s + left_s, since_s + marks.max_s)
