"""From a timeline's events to what a picture shows: spans, curves and marks. Draws nothing."""

from dataclasses import dataclass, field

from sglang_live.report.documents import Timeline, TimelineEvent

Span = tuple[float, float]

# What begins a span, and what ends it.
SPEECH = ({"speech_started"}, {"speech_stopped"})
SUSPICION = ({"speech_suspected"}, {"speech_dismissed", "speech_started", "speech_stopped"})
HOLD = ({"held"}, {"released", "resumed", "response_done", "barge_in", "stopped"})
# What the policies call a stream, and what they do to it.
CLASSES = ("u0", "u1", "u2", "unknown")
# Nothing more is heard of a response after these.
CUTS = ("barge_in", "stopped", "truncated")


@dataclass(slots=True)
class ReplyCurve:
    """One response: seconds of audio generated, sent and heard against time.

    truncated_s: when the user interrupted it; None: it was played out.
    """

    response: str
    created_s: float
    done_s: float | None = None
    truncated_s: float | None = None
    generated: list[Span] = field(default_factory=list)
    sent: list[Span] = field(default_factory=list)
    heard: list[Span] = field(default_factory=list)

    @property
    def playing(self) -> Span | None:
        """From the first audio sent to the last heard."""
        if not self.sent:
            return None
        return self.sent[0][0], max(self.sent[0][0], self.heard[-1][0] if self.heard else 0.0)

    @property
    def unheard_s(self) -> float:
        if self.truncated_s is None or not self.sent:
            return 0.0
        return max(0.0, self.sent[-1][1] - (self.heard[-1][1] if self.heard else 0.0))


def spans(timeline: Timeline, which: tuple[set[str], set[str]]) -> list[Span]:
    """What is still open at the end of the timeline ends there."""
    begins, ends = which
    found: list[Span] = []
    began_s: float | None = None
    for event in timeline.events:
        if began_s is None and event.event in begins:
            began_s = event.t_s if event.onset_t_s is None else event.onset_t_s
        elif began_s is not None and event.event in ends:
            found.append((began_s, event.t_s))
            began_s = None
    if began_s is not None:
        found.append((began_s, timeline.end_s))
    return found


def stream_spans(timeline: Timeline, stage: str) -> dict[str, list[Span]]:
    """When a stage's streams were in which class, and when they sat out ("held")."""
    found: dict[str, list[Span]] = {name: [] for name in (*CLASSES, "held")}
    open_class: tuple[str, float] | None = None
    held_s: float | None = None

    def close(at_s: float) -> None:
        nonlocal open_class, held_s
        if open_class is not None:
            found[open_class[0]].append((open_class[1], at_s))
        if held_s is not None:
            found["held"].append((held_s, at_s))
        open_class = held_s = None

    for event in timeline.events:
        if event.event in ("response_created", "response_done", *CUTS):
            close(event.t_s)
        if event.event != "stream" or event.stage != stage:
            continue
        if event.what in CLASSES:
            if open_class is not None:
                found[open_class[0]].append((open_class[1], event.t_s))
            open_class = event.what, event.t_s
        elif event.what == "held":
            held_s = event.t_s
        elif held_s is not None:
            found["held"].append((held_s, event.t_s))
            held_s = None
    close(timeline.end_s)
    return found


def marks(timeline: Timeline, name: str) -> list[float]:
    return [event.t_s for event in timeline.events if event.event == name]


def dry_spans(timeline: Timeline) -> list[Span]:
    """When the listener waited in the middle of a reply."""
    underruns = [event for event in timeline.events if event.event == "underrun"]
    if underruns:
        return [(event.t_s - (event.silent_s or 0.0), event.t_s) for event in underruns]
    found = []
    dry: TimelineEvent | None = None
    for event in timeline.events:
        # A reply also runs dry at its end; only what plays again was a stall.
        if event.event == "playing" and dry is not None and dry.response == event.response:
            found.append((dry.t_s, event.t_s))
        if event.event in ("dry", "playing"):
            dry = event if event.event == "dry" else None
    return found


def reply_curves(timeline: Timeline) -> list[ReplyCurve]:
    """In the order the responses began. An event that names none is of the latest one."""
    curves: dict[str, ReplyCurve] = {}
    latest: str | None = None
    for event in timeline.events:
        latest = event.response or latest
        if event.response is not None and event.response not in curves:
            curves[event.response] = ReplyCurve(event.response, event.t_s)
        if latest is not None:
            _add(curves[latest], event)
    for curve in curves.values():
        _play_out(curve)
    return [curve for curve in curves.values() if curve.sent or curve.done_s is not None]


def _add(curve: ReplyCurve, event: TimelineEvent) -> None:
    # What follows the cut is bookkeeping: the listener's device is silent.
    if curve.truncated_s is None:
        if event.event == "first_audio" and event.sent_s is None:
            curve.sent.append((event.t_s, 0.0))
        heard_s = event.position_s if event.event == "truncated" else event.heard_s
        for points, value in (
            (curve.generated, event.generated_s),
            (curve.sent, event.sent_s),
            (curve.heard, heard_s),
        ):
            if value is not None:
                points.append((event.t_s, value))
        if event.event in CUTS:
            curve.truncated_s = event.t_s
    if event.event == "response_done":
        curve.done_s = event.t_s


def _play_out(curve: ReplyCurve) -> None:
    """A listener goes on hearing at the pace of time what was sent, unless it was cut."""
    if not curve.sent or curve.truncated_s is not None:
        return
    last_s, heard_s = curve.heard[-1] if curve.heard else (curve.sent[0][0], 0.0)
    left_s = curve.sent[-1][1] - heard_s
    if left_s > 0:
        end_s = last_s + left_s
        curve.heard.append((end_s, curve.sent[-1][1]))
        curve.sent.append((max(end_s, curve.sent[-1][0]), curve.sent[-1][1]))
