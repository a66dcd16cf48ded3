"""How long a reply's first sound waits, so that the second is not late.

The first chunk is small and leaves at once; on a busy server the next one may take longer than the
first one plays. How late chunks were for the replies just before, with as much company, tells how
late they will be.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStartConfig:
    """
    share: of replies that a head start should spare a gap.
    bridged_s: so short a gap is hidden by a player's jitter buffer, and worth nobody's waiting.
    max_s: nobody waits longer than this for the first sound of an answer that is there.
    safe_s: with so much audio ahead of playback the beginning is over.
    n_replies, max_age_s: how much of the past counts.
    company_range: replies that began with so many others more or fewer tell about this one.
    """

    share: float = 0.95
    bridged_s: float = 0.08
    max_s: float = 0.3
    safe_s: float = 0.4
    n_replies: int = 64
    max_age_s: float = 60.0
    company_range: int = 1


def lateness_s(arrivals: Sequence[tuple[float, float]]) -> float:
    """The head start that would have kept a reply free of gaps, VoxServe eq. 2.

    Args:
        arrivals: (time, duration) of its chunks in seconds, in order.
    """
    latest_s, audio_s = 0.0, 0.0
    for at_s, duration_s in arrivals:
        if audio_s:
            latest_s = max(latest_s, at_s - arrivals[0][0] - audio_s)
        audio_s += duration_s
    return latest_s


def startup_delay_s(
    known: Sequence[tuple[int, float]], company: int, config: HeadStartConfig
) -> float:
    """For the next reply, from the replies before it. None known: none is given.

    Args:
        known: (company, lateness in seconds) of each: how many others were being made
            when it began.
        company: of the next one.
    """
    if not known:
        return 0.0
    nearest = min(abs(others - company) for others, _ in known)
    alike = max(nearest, config.company_range)
    ordered = sorted(late_s for others, late_s in known if abs(others - company) <= alike)
    at = min(len(ordered) - 1, int(config.share * len(ordered)))
    return min(max(ordered[at] - config.bridged_s, 0.0), config.max_s)
