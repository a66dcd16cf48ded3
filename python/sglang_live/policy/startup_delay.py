"""Startup delay: how long the first sound of a response waits, so that no gap follows.

The first chunk is small and could leave at once; on a busy server the next one may take longer than
the first one plays. The lateness of chunks of the latest responses that began in similar company is
the estimate for the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupDelayConfig:
    """
    share: share of responses that the delay should keep free of gaps.
    bridged_s: longest gap that a player's jitter buffer hides, and that needs no delay.
    max_s: longest delay of a first sound that exists.
    safe_s: with this much audio ahead of playback the beginning is over.
    n_responses, max_age_s: number and age of the past responses that count.
    company_range: responses that began with this many others more or fewer count as similar.
    """

    share: float = 0.95
    bridged_s: float = 0.08
    max_s: float = 0.3
    safe_s: float = 0.4
    n_responses: int = 64
    max_age_s: float = 60.0
    company_range: int = 1


def lateness_s(arrivals: Sequence[tuple[float, float]]) -> float:
    """Returns the delay that would have kept a response free of gaps, VoxServe eq. 2.

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
    known: Sequence[tuple[int, float]], company: int, config: StartupDelayConfig
) -> float:
    """Returns the delay of the next response; 0 if no earlier response is known.

    Args:
        known: (company, lateness in seconds) of earlier responses. Company is the number of other
            responses in progress when one begins.
        company: company of the next response.
    """
    if not known:
        return 0.0
    nearest = min(abs(others - company) for others, _ in known)
    alike = max(nearest, config.company_range)
    ordered = sorted(late_s for others, late_s in known if abs(others - company) <= alike)
    at = min(len(ordered) - 1, int(config.share * len(ordered)))
    return min(max(ordered[at] - config.bridged_s, 0.0), config.max_s)
