"""Perplexity against window, and right answers against window."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.report import look

LABELS = {
    "sink+window": "sink and window",
    "window": "window alone",
    "again": "oldest turns left out, the rest prefilled again",
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """rows: of the document. path: SVG or PNG, by its name."""
    kinds = list(rows[0]["texts"])
    with look.settings():
        figure = Figure(figsize=(4.2 * (len(kinds) + 1), 3.8), layout="constrained")
        axes = figure.subplots(1, len(kinds) + 1)
        for axis, kind in zip(axes, kinds, strict=False):
            _curves(axis, rows, lambda row, kind=kind: row["texts"][kind]["ratio_to_full"])
            axis.axhline(1, color=look.GREY, linewidth=0.8, linestyle="--")
            axis.set(title=f"{kind}: perplexity, full context = 1", yscale="log")
        for where, style in (("late", "-"), ("early", ":")):
            _curves(
                axes[-1],
                rows,
                lambda row, where=where: row["answers"][where]["chosen"],
                style,
                f", said {where}",
            )
        axes[-1].axhline(1 / 8, color=look.GREY, linewidth=0.8, linestyle="--")
        axes[-1].set(title="facts chosen among eight", ylim=(0, 1))
        for axis in axes:
            axis.set_xlabel("window, tokens")
            axis.set_xscale("log", base=2)
        axes[0].legend(fontsize=7)
        axes[-1].legend(fontsize=7)
        figure.suptitle("A bounded session's quality, SmolLM2-135M")
        look.save(figure, path)


def _curves(
    axis: Any, rows: list[dict[str, Any]], value: Any, style: str = "-", more: str = ""
) -> None:
    for (name, label), color, marker in zip(LABELS.items(), look.ARMS, look.MARKERS, strict=False):
        own = [row for row in rows if row["arm"]["name"].rpartition(" ")[0] == name]
        found = [value(row) for row in own]
        axis.errorbar(
            [row["arm"]["window_tokens"] for row in own],
            [v["value"] for v in found],
            yerr=[[v["value"] - v["low"] for v in found], [v["high"] - v["value"] for v in found]],
            label=label + more,
            color=color,
            marker=marker,
            linestyle=style,
            capsize=2,
        )
