"""What an arm gains over the best baseline at the same number of users.

Baselines are the arms whose rounds SGLang alone decides. The best one is found anew for each
measure and number of users, so that no single baseline's weakness makes a gain.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from benchmark.load.tables import by_point, percent
from sglang_live.extensions.planner.simulation.load.stats import PointStats


@dataclass(frozen=True, slots=True)
class Measured:
    """A point with all seeds together, and with each of them alone.

    busy: share of the time in which the device computes, mean of the seeds.
    """

    whole: PointStats
    by_seed: tuple[PointStats, ...]
    busy: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far an arm is from what the device allows.

    Attributes:
        alone_ms: P90 of the first audio of a user alone on the device.
        times_alone: P90 with `at` users, over that; `at` is 0.8 of the most within the SLO.
        busy: share of the time in which the device computes with the most users within the SLO, so
            their share of the users that would keep it busy at the same work for each.
    """

    alone_ms: float
    at: int
    times_alone: float
    busy: float


def bounds(measured: Callable[[int], Measured], users: int) -> Bounds | None:
    """measured: by number of users. users: the most within the SLO. None without a P90."""
    at = round(0.8 * users)
    alone, there = _p90_ms(measured(1).whole), _p90_ms(measured(at).whole)
    if alone is None or there is None:
        return None
    return Bounds(alone, at, there / alone, measured(users).busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """
    Attributes:
        baseline: the one with the earliest P90.
        p90_ms, p90_from_ms: of the arm, and of that baseline.
        earlier: P90 of the baseline over the arm's: the mean of all seeds, the least, the largest.
        useful: useful turns per second over those of the baseline that has the most, likewise.
        continuity: the arm's less that of the most continuous baseline.
        waste_avoided: share of the least waste of any baseline.
    """

    baseline: str
    p90_ms: float
    p90_from_ms: float
    earlier: tuple[float, float, float]
    useful: tuple[float, float, float]
    continuity: float
    waste_avoided: float | None


def gain(arm: Measured, baselines: list[Measured]) -> Gain | None:
    """None without a P90 of the arm or of any baseline."""
    known = [one for one in baselines if _p90_ms(one.whole) is not None]
    if not known or _p90_ms(arm.whole) is None:
        return None
    best = min(known, key=lambda one: _known_p90_ms(one.whole))
    most_useful = max(baselines, key=lambda one: one.whole.useful_turns_per_s)
    continuity = max(one.whole.continuity or 0.0 for one in baselines)
    wastes = [one.whole.waste for one in baselines if one.whole.waste is not None]
    least_waste = min(wastes, default=0.0)
    pairs = list(zip(best.by_seed, arm.by_seed, strict=True))
    useful = list(zip(arm.by_seed, most_useful.by_seed, strict=True))
    return Gain(
        baseline=best.whole.policies,
        p90_ms=_known_p90_ms(arm.whole),
        p90_from_ms=_known_p90_ms(best.whole),
        earlier=_spread([_known_p90_ms(a) / _known_p90_ms(b) for a, b in pairs]),
        useful=_spread([a.useful_turns_per_s / max(b.useful_turns_per_s, 1e-9) for a, b in useful]),
        continuity=(arm.whole.continuity or 0.0) - continuity,
        waste_avoided=None
        if arm.whole.waste is None or least_waste < 0.001
        else 1 - arm.whole.waste / least_waste,
    )


def gains_table(points: list[PointStats], found: list[Gain]) -> str:
    """points: of the arms, in the order of what was found."""
    header = (
        "P90 ms",
        "best baseline's",
        "which",
        "times earlier",
        "times useful",
        "continuity",
        "waste avoided",
    )
    rows = [
        (
            f"{one.p90_ms:.0f}",
            f"{one.p90_from_ms:.0f}",
            one.baseline,
            _text(one.earlier),
            _text(one.useful),
            f"{100 * one.continuity:+.1f}",
            percent(one.waste_avoided),
        )
        for one in found
    ]
    return by_point(header, points, rows)


def _p90_ms(point: PointStats) -> float | None:
    return point.ttfp_after_detection_ms.p90


def _known_p90_ms(point: PointStats) -> float:
    found = _p90_ms(point)
    assert found is not None, "each seed has enough turns"
    return found


def _spread(values: list[float]) -> tuple[float, float, float]:
    return fmean(values), min(values), max(values)


def _text(spread: tuple[float, float, float]) -> str:
    mean, least, largest = spread
    return f"{mean:.2f} ({least:.2f} to {largest:.2f})"
