"""Curves of the arms over the number of users, one row of axes for each load."""

from pathlib import Path
from typing import Any

from sglang_live.extensions.planner.simulation.load.stats import TTFP_SLO_MS, PointStats

_MEASURES = (
    ("P90 of first audio after the end of the turn, ms", lambda p: p.ttfp_after_detection_ms.p90),
    ("continuous responses, %", lambda p: 100 * p.continuity),
    ("turns per second", lambda p: p.turns_per_s),
    ("waste of the talker, %", lambda p: round(100 * p.waste, 3)),
)


def draw(loads: dict[float, list[PointStats]], title: str, path: Path) -> None:
    """loads: points of all arms by the share of interrupted responses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (4.2 * len(_MEASURES), 3.2 * len(loads))
    figure, axes = pyplot.subplots(len(loads), len(_MEASURES), figsize=size, squeeze=False)
    for row, (barge_in, points) in zip(axes, loads.items(), strict=True):
        for axis, (name, value) in zip(row, _MEASURES, strict=True):
            _curves(axis, points, value)
            axis.set_title(f"{name}\ninterruptions {barge_in:g}", fontsize=8)
            axis.set_xlabel("users", fontsize=8)
        row[0].axhline(TTFP_SLO_MS, color="grey", linewidth=0.8, linestyle=":")
        row[0].set_yscale("log")
        row[0].legend(fontsize=7)
    figure.suptitle(f"Simulated, modelled device: {title}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(axis: Any, points: list[PointStats], value: Any) -> None:
    for arm in dict.fromkeys(point.policies for point in points):
        own = [point for point in points if point.policies == arm]
        axis.plot([p.sessions for p in own], [value(p) for p in own], marker="o", ms=3, label=arm)
