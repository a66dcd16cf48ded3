"""The curves of delay against false cut-offs, drawn with matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmark.turn_taking.components import TUNED
from lab.report import look


def draw(rows: Sequence[dict], path: Path, source: str = "all") -> None:
    """rows: as report.end_rows makes them. path: SVG or PNG, by its name."""
    with look.settings():
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        own = [r for r in rows if r["source"] == source and r["component"] != TUNED]
        for component in dict.fromkeys(row["component"] for row in own):
            points = sorted(
                (100 * row["false_cutoffs"], row["delay_p50_ms"], row["delay_p90_ms"])
                for row in own
                if row["component"] == component and row["delay_p90_ms"] is not None
            )
            share, p50, p90 = zip(*points, strict=True)
            # Settings of which none lies between two others are points, not a curve.
            whole, dotted = ("o", "x") if component == "semantic_vad" else ("o-", "o:")
            [line] = axes.plot(share, p50, whole, label=f"{component}, median")
            axes.plot(share, p90, dotted, color=line.get_color(), label=f"{component}, P90")
        axes.axvline(5, color=look.GREY, linewidth=0.8, linestyle="--")
        axes.set(xlabel="pauses taken for the end of the turn, %", ylabel="delay of the end, ms")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.suptitle("End of turn: delay against false cut-offs")
        look.save(figure, path)
