"""Latency, throughput, continuity and waste by arm of one voice_load document."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.report import look
from lab.report.documents import LoadDocument, place

Point = dict[str, Any]
Value = Callable[[Point], float | None]
# benchmark.voice_load's SLO on continuity and viability.
SLO_PERCENT = 99


def save(document: LoadDocument, path: Path) -> None:
    with look.settings():
        look.save(draw(document), path)


def draw(document: LoadDocument) -> Figure:
    figure = Figure(figsize=(11, 8.2), layout="constrained")
    latency, frontier, smooth, waste = figure.subplots(2, 2).flat
    load = "arrivals per second" if document.open_loop else "sessions at once"
    panels = (
        (latency, "P90 TTFP against load", load, "P90 TTFP (ms)", place, _p90_ms),
        (
            frontier,
            "Throughput against latency, by load",
            "P90 TTFP (ms)",
            "turns/s",
            _p90_ms,
            _turns_per_s,
        ),
        (smooth, *_smoothness(document, load)),
        (
            waste,
            "Waste: generated, never heard",
            load,
            "talker's frames (%)",
            place,
            _waste_percent,
        ),
    )
    for axes, title, x_name, y_name, x, y in panels:
        _draw_panel(axes, document, x, y)
        axes.set(title=title, xlabel=x_name, ylabel=y_name)
    _name_points(frontier, document)
    if smooth.lines:
        _draw_slo(smooth)
    for axes in (latency, smooth, waste):
        _set_load_ticks(axes, document)
    figure.suptitle(_title(document), x=0.01, ha="left", fontsize=13)
    handles, labels = latency.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=min(5, len(labels)))
    figure.supxlabel(_footnote(document), fontsize=8.5, color=look.GREY, x=0.01, ha="left")
    return figure


def _smoothness(document: LoadDocument, load: str) -> tuple[str, str, str, Value, Value]:
    if document.open_loop:
        return "Streaming viability", load, "packets in time (%)", place, _viability_percent
    name = "Continuity: no gap over 100 ms"
    return name, load, "uninterrupted turns (%)", place, _continuity_percent


def _draw_panel(
    axes: Axes,
    document: LoadDocument,
    x: Value,
    y: Value,
) -> None:
    any_known = False
    for number, (arm, points) in enumerate(document.arms.items()):
        known = [
            (at, value)
            for point in points
            if (at := x(point)) is not None and (value := y(point)) is not None
        ]
        any_known |= bool(known)
        axes.plot(
            [at for at, _ in known],
            [value for _, value in known],
            color=_colour(arm, number),
            marker=look.MARKERS[number % len(look.MARKERS)],
            # Later lines are thinner, so that coinciding arms stay visible.
            lw=2.6 if number == 0 else 1.6,
            markersize=7,
            label=arm,
        )
    if any_known:
        axes.set_ylim(bottom=0)
        axes.margins(x=0.08, y=0.12)
        return
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=look.GREY)
    axes.set(xticks=[], yticks=[])


def _colour(arm: str, number: int) -> str:
    return look.BLACK if arm == "off" else look.ARMS[number % len(look.ARMS)]


def _name_points(axes: Axes, document: LoadDocument) -> None:
    """Write the load next to the points of the first and the last arm; more would overlap."""
    arms = list(document.arms)
    below = ((7, -4), "left", "top")
    above = ((-7, 4), "right", "bottom")
    for arm, (offset, ha, va) in {arms[0]: below, arms[-1]: above}.items():
        for point in document.arms[arm]:
            if (p90_ms := _p90_ms(point)) is None:
                continue
            axes.annotate(
                f"{place(point):g}",
                (p90_ms, _turns_per_s(point)),
                xytext=offset,
                textcoords="offset points",
                ha=ha,
                va=va,
                fontsize=9,
                color=_colour(arm, arms.index(arm)),
            )


def _draw_slo(axes: Axes) -> None:
    values = [float(y) for line in axes.lines for y in np.asarray(line.get_ydata())]
    if not values:
        return
    axes.axhline(SLO_PERCENT, color=look.RED, lw=1, ls=(0, (4, 3)))
    # Show the last percents if all values are near the SLO, else the whole range.
    axes.set_ylim(min(90.0, 5 * ((min(values) - 1) // 5)), 101)
    axes.annotate(
        f"SLO {SLO_PERCENT} %",
        (0.995, SLO_PERCENT),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8.5,
        color=look.RED,
    )


def _set_load_ticks(axes: Axes, document: LoadDocument) -> None:
    if axes.get_xticks().size:
        axes.set_xticks(sorted({place(p) for points in document.arms.values() for p in points}))


def _title(document: LoadDocument) -> str:
    return f"Voice load: {document.facts.get('workload', '')}"


def _footnote(document: LoadDocument) -> str:
    facts = document.facts
    known = [
        facts.get("device"),
        f"commit {str(facts.get('git_commit'))[:9]}" if facts.get("git_commit") else None,
        f"SGLang {facts['sglang_version']}" if facts.get("sglang_version") else None,
        str(facts.get("date", ""))[:10] or None,
        f"seed {facts['seed']}" if "seed" in facts else None,
    ]
    missing = sum(_p90_ms(point) is None for points in document.arms.values() for point in points)
    if missing:
        known.append(f"{missing} points had fewer than the 10 turns that a P90 needs")
    return "; ".join(str(fact) for fact in known if fact)


def _p90_ms(point: Point) -> float | None:
    p90_ms: float | None = point["ttfp_ms"]["p90"]
    return p90_ms


def _turns_per_s(point: Point) -> float:
    return float(point["turns_per_s"])


def _continuity_percent(point: Point) -> float | None:
    return _percent(point.get("continuity"))


def _viability_percent(point: Point) -> float | None:
    return _percent(point.get("viability"))


def _waste_percent(point: Point) -> float | None:
    return _percent(point.get("waste"))


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
