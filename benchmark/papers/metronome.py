"""Metronome's figures 7, 10 and 11, drawn from documents of benchmark.admission and retention.

python -m benchmark.papers.metronome --admission FILE --retention FILE --picture out.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.report import look


def draw(admission: dict[str, Any], retention: dict[str, Any], path: Path) -> None:
    """admission, retention: documents. path: SVG or PNG, by its name."""
    with look.settings():
        figure = Figure(figsize=(11, 7), layout="constrained")
        [discovered, cost], [memory, windows] = figure.subplots(2, 2)
        _discovered(discovered, admission)
        rows = retention["rows"]
        ages = [row for row in rows if " " not in row["arm"]]
        _over_age(cost, ages, "turn_p90_ms", "time of a turn, P90, ms")
        _over_age(memory, ages, "kv_tokens_per_call", "KV of the session, tokens")
        _windows(windows, rows, retention["config"]["window"])
        figure.suptitle("Bounded sessions: Metronome's figures 7, 10 and 11")
        look.save(figure, path)


def _discovered(axis: Any, document: dict[str, Any]) -> None:
    for system, color in zip(document["open_systems"], look.ARMS, strict=False):
        at_s = [one["at_s"] for one in system["trace"]]
        name = "bounded" if system["arm"] == "window" else "not bounded"
        axis.plot(
            at_s, [one["open"] for one in system["trace"]], color=color, label=f"open, {name}"
        )
        axis.plot(at_s, [one["limit"] for one in system["trace"]], ":", color=color, label="limit")
    axis.axhline(document["n_star"], color=look.GREY, linestyle="--", label="by brute force")
    axis.set(title="admitted sessions", xlabel="time, s", ylabel="sessions", ylim=(0, None))
    axis.legend(fontsize=8)


def _over_age(axis: Any, rows: list[dict[str, Any]], what: str, label: str) -> None:
    for row, color, marker in zip(rows, look.ARMS, look.MARKERS, strict=False):
        ages = row["ages"]
        turns, values = [a["turn"] for a in ages], [a[what] for a in ages]
        axis.plot(turns, values, color=color, marker=marker, ms=4, label=row["arm"])
    axis.set(title=label, xlabel="turn", ylim=(0, None))
    axis.legend(fontsize=8)


def _windows(axis: Any, rows: list[dict[str, Any]], first: int) -> None:
    """Over the second half of the turns: all windows have been exceeded."""
    found = {}
    for row in rows:
        name, _, window = row["arm"].partition(" ")
        if name == "bounded":
            half = row["ages"][len(row["ages"]) // 2 :]
            found[int(window or first)] = half
    windows = sorted(found)
    for what, label, color in (("turn_ms", "P50", look.BLUE), ("turn_p90_ms", "P90", look.ORANGE)):
        mean = [sum(a[what] for a in found[w]) / len(found[w]) for w in windows]
        axis.plot(windows, mean, marker="o", color=color, label=label)
    axis.set(title="time of a turn, by window, ms", xlabel="window, tokens", ylim=(0, None))
    axis.legend(fontsize=8)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--admission", type=Path, required=True, help="document of the benchmark")
    parser.add_argument("--retention", type=Path, required=True, help="document of the benchmark")
    parser.add_argument("--picture", type=Path, required=True, help="draw here, SVG or PNG")
    options = parser.parse_args()
    admission, retention = (
        json.loads(path.read_text("utf-8")) for path in (options.admission, options.retention)
    )
    draw(admission, retention, options.picture)


if __name__ == "__main__":
    main()
