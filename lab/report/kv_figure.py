"""KV under memory pressure, and over long sessions, by arm."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from lab.report import look
from lab.report.documents import KvAges, KvPressure

# Tokens of earlier turns by their fate, from bottom to top.
_TOKENS = (
    ("preloaded in time", "tokens_preloaded", look.GREEN),
    ("a prefill waited for", "tokens_loaded", look.ORANGE),
    ("recomputed", "recomputed_tokens", look.RED),
)


def save(document: KvPressure | KvAges, path: Path) -> None:
    with look.settings():
        if isinstance(document, KvPressure):
            look.save(draw_pressure(document), path)
        else:
            look.save(draw_ages(document), path)


def draw_pressure(document: KvPressure) -> Figure:
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    waits, tokens, path = figure.subplots(1, 3)
    for number, (arm, rows) in enumerate(document.arms.items()):
        times_ms = np.sort([ms for row in rows for ms in row["ttft_all_ms"]])
        share = 100 * np.arange(1, len(times_ms) + 1) / len(times_ms)
        waits.step(times_ms, share, where="post", color=_colour(number), label=arm)
    waits.set(
        title="Time to first token",
        xlabel="ms",
        ylabel="turns that waited no longer (%)",
        xscale="log",
        ylim=(0, 101),
    )
    waits.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    waits.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    waits.xaxis.set_minor_formatter(NullFormatter())
    _stack(tokens, document)
    _bars(path, document)
    figure.suptitle(_title("KV pressure", document.facts), x=0.01, ha="left", fontsize=13)
    handles, labels = waits.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
    figure.supxlabel(_footnote(document.facts), fontsize=8.5, color=look.GREY, x=0.01, ha="left")
    return figure


def _stack(axes: Axes, document: KvPressure) -> None:
    arms = list(document.arms)
    floor = np.zeros(len(document.arms))
    for label, name, colour in _TOKENS:
        height = np.array([sum(row[name] for row in rows) for rows in document.arms.values()])
        axes.bar(arms, height, bottom=floor, color=colour, label=label, width=0.6)
        floor += height
    axes.set(title="Evicted tokens of earlier turns", ylabel="tokens")
    axes.legend(fontsize=8.5)


def _bars(axes: Axes, document: KvPressure) -> None:
    seconds = [sum(row["reload_s"] for row in rows) for rows in document.arms.values()]
    loads = [sum(row["loads"] for row in rows) for rows in document.arms.values()]
    colours = [_colour(number) for number in range(len(seconds))]
    bars = axes.bar(list(document.arms), [1000 * s for s in seconds], color=colours, width=0.6)
    axes.bar_label(bars, [f"{n:.0f} loads" for n in loads], fontsize=8.5)
    axes.set(title="Loads that prefills waited for", ylabel="ms in all")
    axes.margins(y=0.12)


def draw_ages(document: KvAges) -> Figure:
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    kept, turns = figure.subplots(1, 2)
    for number, (arm, ages) in enumerate(document.arms.items()):
        tokens = [age["tokens_talked"] for age in ages]
        for axes, name in ((kept, "kv_tokens_per_call"), (turns, "turn_ms")):
            axes.plot(tokens, [age[name] for age in ages], color=_colour(number), label=arm)
    kept.set(title="Memory of a session", ylabel="tokens of KV")
    turns.set(title="Time of a turn", ylabel="ms")
    for axes in (kept, turns):
        axes.set(xlabel="tokens of the conversation so far", ylim=(0, None))
    figure.suptitle(_title("Long sessions", document.facts), x=0.01, ha="left", fontsize=13)
    handles, labels = kept.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
    figure.supxlabel(_footnote(document.facts), fontsize=8.5, color=look.GREY, x=0.01, ha="left")
    return figure


def _colour(number: int) -> str:
    return look.ARMS[number % len(look.ARMS)]


def _title(what: str, facts: dict[str, Any]) -> str:
    config = facts.get("config", {})
    n_sessions = config.get("sessions") or config.get("calls")
    return f"{what}: {n_sessions} sessions" if n_sessions else what


def _footnote(facts: dict[str, Any]) -> str:
    config = facts.get("config", {})
    known = [
        facts.get("device"),
        f"modelled link {config['link']} (GB/s:us)" if config.get("link") else None,
        f"commit {str(facts['git_commit'])[:9]}" if facts.get("git_commit") else None,
        str(facts.get("date", ""))[:10] or None,
    ]
    return "; ".join(str(fact) for fact in known if fact)
