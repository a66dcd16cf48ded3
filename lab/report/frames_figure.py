"""Sessions without an end: their use of a KV pool, and how many of them the server admits."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.report import look
from lab.report.documents import Admission, Collapse


def save(document: Collapse | Admission, path: Path) -> None:
    with look.settings():
        if isinstance(document, Collapse):
            look.save(draw_collapse(document), path)
        else:
            look.save(draw_admission(document), path)


def draw_collapse(document: Collapse) -> Figure:
    """Like figures 4 to 6 of Metronome: single runs thin, their median bold."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    pool, latency, predicted = figure.subplots(1, 3)
    for number, (arm, runs) in enumerate(document.arms.items()):
        colour = look.ARMS[number % len(look.ARMS)]
        _runs(
            pool,
            [[(s["at_s"], 100 * s["share"]) for s in run["pool"] if s["share"]] for run in runs],
            colour,
            f"{arm}: {sum(run['collapsed'] for run in runs)} of {len(runs)} collapsed",
        )
        ages = [[(a["from_s"], a["p50"]) for a in run["latency_by_age_ms"]] for run in runs]
        _runs(latency, ages, colour, arm)
        pairs = [(r["predicted_s"], r["saturated_s"]) for r in runs]
        known = np.array([pair for pair in pairs if None not in pair])
        if len(known):
            predicted.plot(known[:, 0], known[:, 1], "o", color=colour, label=arm)
    pool.set(title="KV pool of the thinker", xlabel="s", ylabel="full (%)", ylim=(0, 105))
    latency.set(
        title="A frame, to its tokens (median)",
        xlabel="age of the session (s)",
        ylabel="ms",
        yscale="log",
    )
    predicted.set(
        title="When the pool was full", xlabel="predicted from its first half (s)", ylabel="s"
    )
    if low_high := _limits(predicted):
        predicted.plot(low_high, low_high, color=look.GREY, linewidth=0.8, linestyle="--")
    return _finished(figure, "Sessions without an end", document.facts, pool)


def draw_admission(document: Admission) -> Figure:
    """Like figure 7 of Metronome."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    admitted, late, ladder = figure.subplots(1, 3)
    for number, found in enumerate(document.open_systems):
        colour = look.ARMS[number % len(look.ARMS)]
        times = [s["at_s"] for s in found["trace"]]
        admitted.plot(times, [s["open"] for s in found["trace"]], color=colour, label=found["arm"])
        limits = [s["limit"] for s in found["trace"]]
        admitted.plot(times, limits, color=colour, linewidth=0.8, linestyle=":")
        known = [(s["at_s"], s["budget_share"]) for s in found["trace"] if s["budget_share"]]
        if known:
            late.plot(*np.array(known).T, color=colour)
    admitted.axhline(document.n_star, color=look.GREY, linestyle="--", linewidth=0.8)
    admitted.set(title="Open sessions (dotted: limit, dashed: N*)", xlabel="s", ylabel="sessions")
    late.axhline(1, color=look.GREY, linestyle="--", linewidth=0.8)
    late.set(title="Share of its budget that the slowest tenth took", xlabel="s", yscale="log")
    sessions = [step["sessions"] for step in document.ladder]
    for name, colour in (("p50", look.BLUE), ("p90", look.ORANGE), ("p99", look.RED)):
        values = [step["latency_ms"][name] or np.nan for step in document.ladder]
        ladder.plot(sessions, values, "o-", color=colour, label=name.upper())
    ladder.set(title="By brute force", xlabel="sessions", ylabel="frame latency (ms)", yscale="log")
    ladder.legend()
    return _finished(figure, "Admission of sessions", document.facts, admitted)


def _runs(axes: Axes, runs: list[list[tuple[float, float]]], colour: str, label: str) -> None:
    for run in runs:
        if run:
            axes.plot(*np.array(run).T, color=colour, linewidth=0.5, alpha=0.4)
    at: dict[int, list[float]] = {}
    for run in runs:
        for x, y in run:
            at.setdefault(round(x), []).append(y)
    # The median only where half of the runs have a point.
    points = [(x, np.median(ys)) for x, ys in sorted(at.items()) if 2 * len(ys) >= len(runs)]
    if points:
        axes.plot(*np.array(points).T, color=colour, linewidth=2, label=label)


def _limits(axes: Axes) -> tuple[float, float] | None:
    if not axes.lines:
        return None
    return min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])


def _finished(figure: Figure, title: str, facts: dict[str, Any], axes: Axes) -> Figure:
    figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=max(1, len(labels)))
    footnote = f"{facts.get('device')}, commit {str(facts.get('git_commit'))[:9]}"
    figure.supxlabel(footnote, fontsize=8.5, color=look.GREY, x=0.01, ha="left")
    return figure
