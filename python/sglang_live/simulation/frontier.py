"""How many users an arm serves within the SLO: searched by bisection over the number of users.

A point is within the SLO by load/stats.py: P90 of the first audio within 500 ms of the detected end
of the turn, 99 % of the responses continuous, none failed; all seeds together.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sglang_live.simulation.load.stats import PointStats

# Relative width at which the search ends, and the largest number of users that it tries.
_CLOSE, _MOST_USERS = 0.03, 1024

Measure = Callable[[str, int], PointStats]


@dataclass(frozen=True, slots=True)
class Capacity:
    """
    Attributes:
        users: the most users within the SLO; 0: not even the least.
        fails_at: the fewest that were found not to be; None: none were.
        why: what fails there.
    """

    users: int
    fails_at: int | None
    why: str


def capacity(measure: Measure, arm: str, least: int = 4) -> Capacity:
    """Search between `least` and the first doubling that misses the SLO."""
    good, bad, why = 0, least, ""
    while bad <= _MOST_USERS:
        point = measure(arm, bad)
        if not point.within_slo:
            why = _why(point)
            break
        good, bad = bad, 2 * bad
    else:
        return Capacity(good, None, "")
    while bad - good > max(1, round(_CLOSE * bad)):
        middle = (good + bad) // 2
        point = measure(arm, middle)
        if point.within_slo:
            good = middle
        else:
            bad, why = middle, _why(point)
    return Capacity(good, bad, why)


def _why(point: PointStats) -> str:
    p90_ms, continuity = point.ttfp_after_detection_ms.p90, point.continuity
    shown_ms = "n/a" if p90_ms is None else f"{p90_ms:.0f} ms"
    shown = "n/a" if continuity is None else f"{100 * continuity:.1f} %"
    return f"P90 {shown_ms}, continuous {shown}, failed {point.failed}"
