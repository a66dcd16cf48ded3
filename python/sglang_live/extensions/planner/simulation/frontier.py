"""How many users an arm serves within the SLO: searched by bisection over the number of users."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from sglang_live.extensions.planner.simulation.engine.pool import PoolFullError
from sglang_live.extensions.planner.simulation.load.stats import (
    CONTINUITY_SLO,
    TTFP_SLO_MS,
    PointStats,
)
from sglang_live.settings import Check, Positive, Settings, flag

Measure = Callable[[str, int], PointStats]
_PartOfAll = Annotated[float, Check("a share up to 1", lambda v: 0 < v <= 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo(Settings):
    first_audio_ms: Positive = flag(
        TTFP_SLO_MS, "P90 of the first audio, from the detected end of a turn"
    )
    continuous: _PartOfAll = flag(
        CONTINUITY_SLO, "of responses without an audible gap", value="SHARE"
    )

    def is_met(self, point: PointStats) -> bool:
        """Also, no turn failed. False if there are too few turns to tell."""
        p90_ms, continuity = point.ttfp_after_detection_ms.p90, point.continuity
        if point.failed or p90_ms is None or continuity is None:
            return False
        return p90_ms <= self.first_audio_ms and continuity >= self.continuous


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


def capacity(
    measure: Measure,
    arm: str,
    least: int = 4,
    *,
    most: int = 1024,
    slo: Slo | None = None,
    close: float = 0.03,
) -> Capacity:
    """Search between `least` and the first growth by half that misses the SLO.

    measure: raises PoolFullError where the users do not fit into the KV pools.
    most: largest number of users that is tried.
    close: relative width at which the search ends.
    """
    slo = slo or Slo()

    def fails(n_users: int) -> str:
        """Why these are not within the SLO; "" if they are."""
        try:
            point = measure(arm, n_users)
        except PoolFullError as error:
            return str(error)
        return "" if slo.is_met(point) else describe(point)

    good, bad, why = 0, least, ""
    while not (why := fails(bad)):
        if bad >= most:
            return Capacity(bad, None, "")
        good, bad = bad, min(bad + (bad + 1) // 2, most)
    while bad - good > max(1, round(close * bad)):
        middle = (good + bad) // 2
        if found := fails(middle):
            bad, why = middle, found
        else:
            good = middle
    return Capacity(good, bad, why)


def describe(point: PointStats) -> str:
    p90_ms, continuity = point.ttfp_after_detection_ms.p90, point.continuity
    shown_ms = "n/a" if p90_ms is None else f"{p90_ms:.0f} ms"
    shown = "n/a" if continuity is None else f"{100 * continuity:.1f} %"
    return f"P90 {shown_ms}, continuous {shown}, failed {point.failed}"
