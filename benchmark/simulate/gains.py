"""What an arm gains over the server with all policies off."""

from dataclasses import dataclass

from sglang_live.extensions.planner.simulation.frontier import Capacity
from sglang_live.extensions.planner.simulation.load.stats import PointStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """What an arm gains over `off`; ratios are arm over off unless they say otherwise.

    Attributes:
        capacity: (off, arm), users within the SLO.
        p90: P90 of off over that of the arm, at the most users that the arm serves.
        turns_past_knee: least and largest ratio of turns per second at points beyond off's
            capacity.
        least_turns: least ratio of turns per second at any point.
        waste: largest share of the waste that the arm avoids at any point within its capacity.
        worse: points at which the arm is worse than off by more than 5 % in P90 or turns per
            second, or by more than a percent in continuity.
    """

    capacity: tuple[int, int]
    p90: float | None
    turns_past_knee: tuple[float, float] | None
    least_turns: float
    waste: float | None
    worse: tuple[str, ...]


def goals(
    off: list[PointStats], arm: list[PointStats], capacities: tuple[Capacity, Capacity]
) -> Goals:
    """Both lists have the same numbers of users."""
    pairs = list(zip(off, arm, strict=True))
    knee, most = capacities[0].users, capacities[1].users
    turns = {b.sessions: b.turns_per_s / a.turns_per_s for a, b in pairs}
    past = [ratio for n, ratio in turns.items() if n > knee]
    at_most = [(a, b) for a, b in pairs if b.sessions <= max(most, pairs[0][1].sessions)]
    p90 = None
    if at_most:
        a, b = at_most[-1]
        if a.ttfp_after_detection_ms.p90 and b.ttfp_after_detection_ms.p90:
            p90 = a.ttfp_after_detection_ms.p90 / b.ttfp_after_detection_ms.p90
    wastes = [1 - b.waste / a.waste for a, b in at_most if a.waste and b.waste and a.waste > 0.01]
    return Goals(
        capacity=(knee, most),
        p90=p90,
        turns_past_knee=(min(past), max(past)) if past else None,
        least_turns=min(turns.values()),
        waste=max(wastes, default=None),
        worse=tuple(text for a, b in pairs for text in _worse(a, b)),
    )


def _worse(off: PointStats, arm: PointStats) -> list[str]:
    found = []
    a_ms, b_ms = off.ttfp_after_detection_ms.p90, arm.ttfp_after_detection_ms.p90
    if a_ms and b_ms and b_ms > 1.05 * a_ms + 5:
        found.append(f"{arm.sessions} users: P90 {a_ms:.0f} to {b_ms:.0f} ms")
    if arm.turns_per_s < 0.95 * off.turns_per_s:
        found.append(
            f"{arm.sessions} users: turns/s {off.turns_per_s:.2f} to {arm.turns_per_s:.2f}"
        )
    if off.continuity and arm.continuity is not None and arm.continuity < off.continuity - 0.01:
        found.append(
            f"{arm.sessions} users: continuous {off.continuity:.3f} to {arm.continuity:.3f}"
        )
    return found
