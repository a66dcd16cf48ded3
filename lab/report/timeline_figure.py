"""One session from beginning to end: speech, sent audio, heard audio."""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.report import look, spans
from lab.report.documents import Timeline
from lab.report.spans import ResponseCurve, Span

STAGES = ("thinker", "talker")
WIDTH_PER_S = 0.45
MIN_WIDTH = 9.0
MAX_WIDTH = 24.0
LANES = ("user", "response", "response heard", "audio held", "thinker", "talker")
_CLASS_COLOURS = {"u0": look.RED, "u1": look.SKY, "u2": look.GREEN, "unknown": look.BLACK}
_CLASS_LABELS = {
    "u0": "U0: may stall",
    "u1": "U1: no audio yet",
    "u2": "U2: buffered",
    "unknown": "no telemetry",
}
_BAR = 0.36  # half of a lane's bar, in lanes


def save(timeline: Timeline, path: Path) -> None:
    with look.settings():
        look.save(draw(timeline), path)


def draw(timeline: Timeline) -> Figure:
    curves = spans.response_curves(timeline)
    ends_s = [curve.playing[1] for curve in curves if curve.playing]
    end_s = max([timeline.end_s, *ends_s])
    width = min(MAX_WIDTH, max(MIN_WIDTH, WIDTH_PER_S * end_s))
    figure = Figure(figsize=(width, 7.4), layout="constrained")
    lanes, buffer = figure.subplots(2, 1, sharex=True, height_ratios=(1.25, 1.25))
    _draw_lanes(lanes, timeline, curves)
    _draw_buffer(buffer, curves)
    for axes in (lanes, buffer):
        _draw_interruptions(axes, timeline)
    buffer.set_xlabel("time since the session began (s)")
    buffer.set_xlim(0, end_s * 1.01)
    figure.suptitle(_title(timeline), x=0.01, ha="left", fontsize=12)
    handles = _legend(timeline, curves)
    # Below the data, on as many lines as its labels need.
    columns = max(3, min(len(handles), int(width / 2.1)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=9)
    return figure


def _title(timeline: Timeline) -> str:
    title = f"Session {timeline.session}"
    return f"{title} ({timeline.dropped} events not recorded)" if timeline.dropped else title


def _draw_lanes(axes: Axes, timeline: Timeline, curves: list[ResponseCurve]) -> None:
    _bars(axes, 0, spans.spans(timeline, spans.SUSPICION), look.SKY, hatch="////")
    _bars(axes, 0, spans.spans(timeline, spans.SPEECH), look.GREEN)
    open_spans = [(c.created_s, c.done_s) for c in curves if c.done_s is not None]
    _bars(axes, 1, open_spans, "#BBBBBB")
    _bars(axes, 2, [curve.playing for curve in curves if curve.playing], look.BLUE)
    stalls = spans.stall_spans(timeline)
    _bars(axes, 2, stalls, look.ORANGE)
    _bars(axes, 3, spans.spans(timeline, spans.HOLD), look.PURPLE)
    for lane, stage in enumerate(STAGES, start=4):
        found = spans.stream_spans(timeline, stage)
        for name, colour in _CLASS_COLOURS.items():
            _bars(axes, lane, found[name], colour)
        _bars(axes, lane, found["paused"], look.GREY, hatch="////")
    middles_s = [(begin_s + end_s) / 2 for begin_s, end_s in stalls]
    axes.plot(middles_s, [2.0] * len(stalls), "x", color=look.BLACK, markersize=8, mew=2)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _bars(axes: Axes, lane: int, found: Iterable[Span], colour: str, hatch: str = "") -> None:
    # A span of a few milliseconds would be invisible.
    bars = [(begin_s, max(end_s - begin_s, 0.02)) for begin_s, end_s in found]
    face = "white" if hatch else colour
    axes.broken_barh(
        bars, (lane - _BAR, 2 * _BAR), facecolor=face, edgecolor=colour, hatch=hatch, linewidth=1
    )


def _draw_buffer(axes: Axes, curves: list[ResponseCurve]) -> None:
    top_s = 0.0
    for curve in curves:
        if not curve.sent:
            continue
        generated = [value for _, value in curve.generated]
        top_s = max(top_s, curve.sent[-1][1], *generated)
        times_s = [t for t, _ in curve.generated]
        axes.plot(times_s, generated, color=look.GREY, lw=1.2, ls=(0, (1, 1.5)))
        start_s = curve.sent[0][0]
        sent = [(start_s, 0.0), *curve.sent]
        heard = [(start_s, 0.0), *curve.heard]
        times_s = sorted({t for t, _ in sent} | {t for t, _ in heard})
        sent_s = [_at(sent, t) for t in times_s]
        heard_s = [_along(heard, t) for t in times_s]
        axes.fill_between(times_s, heard_s, sent_s, color=look.ORANGE, alpha=0.25, lw=0)
        axes.plot(times_s, sent_s, color=look.ORANGE, lw=1.8)
        axes.plot(times_s, heard_s, color=look.BLUE, lw=1.8)
        if curve.truncated_s is not None and curve.unheard_s >= 0.01:
            axes.annotate(
                f"{curve.unheard_s:.1f} s\nnever heard",
                (curve.truncated_s, curve.sent[-1][1]),
                xytext=(8, -2),
                textcoords="offset points",
                va="top",
                fontsize=9,
                color=look.RED,
                # Above the grid and the lines of the interruption.
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
                zorder=5,
            )
    axes.set_ylabel("audio of the response (s)")
    axes.set_ylim(0, max(1.0, math.ceil(top_s * 1.12 * 2) / 2))


def _at(steps: list[Span], t_s: float) -> float:
    """Sent audio grows in packets: the latest value."""
    return max(value for at_s, value in steps if at_s <= t_s)


def _along(points: list[Span], t_s: float) -> float:
    """Heard audio grows with time: a value on the line between two points."""
    for (a_s, a), (b_s, b) in itertools.pairwise(points):
        if a_s <= t_s <= b_s:
            return b if b_s == a_s else a + (b - a) * (t_s - a_s) / (b_s - a_s)
    return points[-1][1]


def _draw_interruptions(axes: Axes, timeline: Timeline) -> None:
    for at_s in (*spans.marks(timeline, "barge_in"), *spans.marks(timeline, "stopped")):
        axes.axvline(at_s, color=look.RED, lw=1.6)
    for at_s in spans.marks(timeline, "truncated"):
        axes.axvline(at_s, color=look.RED, lw=1.2, ls=(0, (3, 3)))


def _legend(timeline: Timeline, curves: list[ResponseCurve]) -> list[Patch | Line2D]:
    names = {event.event for event in timeline.events}
    entries: list[tuple[bool, Patch | Line2D]] = [
        ("speech_started" in names, Patch(color=look.GREEN, label="user speaks")),
        (
            "speech_suspected" in names,
            Patch(facecolor="white", edgecolor=look.SKY, hatch="////", label="speech suspected"),
        ),
        (any(c.done_s for c in curves), Patch(color="#BBBBBB", label="response open")),
        (any(c.sent for c in curves), Patch(color=look.BLUE, label="heard")),
        (any(c.sent for c in curves), Line2D([], [], color=look.ORANGE, label="sent")),
        (
            any(c.generated for c in curves),
            Line2D([], [], color=look.GREY, ls=(0, (1, 1.5)), label="generated"),
        ),
        (
            any(c.sent for c in curves),
            Patch(color=look.ORANGE, alpha=0.25, label="buffer: sent, not heard yet"),
        ),
        ("held" in names, Patch(color=look.PURPLE, label="audio held")),
        *_stream_entries(timeline),
        (
            bool(spans.stall_spans(timeline)),
            Line2D([], [], color=look.BLACK, marker="x", mew=2, ls="", label="stall"),
        ),
        (
            bool({"barge_in", "stopped"} & names),
            Line2D([], [], color=look.RED, lw=1.6, label="barge-in or cancel"),
        ),
        (
            "truncated" in names,
            Line2D([], [], color=look.RED, lw=1.2, ls=(0, (3, 3)), label="truncated"),
        ),
    ]
    return [handle for shown, handle in entries if shown]


def _stream_entries(timeline: Timeline) -> list[tuple[bool, Patch]]:
    what = {event.what for event in timeline.events if event.event == "stream"}
    classes = [
        (name in what, Patch(color=colour, label=_CLASS_LABELS[name]))
        for name, colour in _CLASS_COLOURS.items()
    ]
    paused = Patch(facecolor="white", edgecolor=look.GREY, hatch="////", label="paused")
    return [*classes, (any(name in what for name in spans.PAUSES), paused)]
