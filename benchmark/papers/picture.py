"""Panels of curves over the rows of experiments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmark.papers.experiments import Row
from lab.report import look

COLUMNS = 2


@dataclass(frozen=True, slots=True)
class Point:
    """What is no field of a row."""

    arm: str
    x: float
    y: float | None


@dataclass(frozen=True, slots=True)
class Panel:
    """x, y: fields of a row, or of a point. scale: factor of y."""

    title: str
    x_label: str
    y_label: str
    rows: Sequence[Row] | Sequence[Point]
    x: str
    y: str
    scale: float = 1.0
    log: bool = False


def draw(title: str, panels: Sequence[Panel], path: Path) -> None:
    """path: SVG or PNG, by its name."""
    n_lines = math.ceil(len(panels) / COLUMNS)
    with look.settings():
        figure = Figure(figsize=(5.2 * COLUMNS, 3.6 * n_lines), layout="constrained")
        axes = list(figure.subplots(n_lines, COLUMNS, squeeze=False).flat)
        for axis, panel in zip(axes, panels, strict=False):
            _curves(axis, panel)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        figure.suptitle(title)
        look.save(figure, path)


def _curves(axis: Any, panel: Panel) -> None:
    # Over policies there is a line for each load, over loads one for each arm.
    line = "barge_in" if panel.x == "arm" else "arm"
    names = dict.fromkeys(getattr(row, line) for row in panel.rows)
    for name, color, marker in zip(names, look.ARMS, look.MARKERS, strict=False):
        points = [
            (getattr(row, panel.x), panel.scale * getattr(row, panel.y))
            for row in panel.rows
            if getattr(row, line) == name and getattr(row, panel.y) is not None
        ]
        label = name if line == "arm" else f"interruptions {name:g}"
        if points:
            axis.plot(*zip(*points, strict=True), color=color, marker=marker, ms=4, label=label)
    axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    if panel.x == "arm":
        axis.tick_params(axis="x", labelrotation=60, labelsize=7)
    axis.legend(fontsize=8)
