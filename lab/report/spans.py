"""Spans, curves and marks of a timeline's events. Draws nothing."""

from dataclasses import dataclass, field

from lab.report.documents import Timeline, TimelineEvent

Span = tuple[float, float]

# Events that begin a span, and events that end it.
SPEECH = ({"speech_started"}, {"speech_stopped"})
SUSPICION = ({"speech_suspected"}, {"speech_dismissed", "speech_started", "speech_stopped"})
HOLD = ({"held"}, {"released", "resumed", "response_done", "barge_in", "stopped"})
# Classes of a request in the policies (policy/view.py).
CLASSES = ("u0", "u1", "u2", "unknown")
# A pause of a request. Timelines of earlier versions call it "held".
PAUSES = ("paused", "held")
# Events after which no audio of a response is heard.
ENDS = ("barge_in", "stopped", "truncated")


@dataclass(slots=True)
class ResponseCurve:
    """One response: seconds of audio generated, sent and heard over time.

    done_s: time of response.done; None: the response is not over.
    truncated_s: time at which the user interrupted it; None: it was played out.
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
        """From the first sent to the last heard audio; None without audio."""
        if not self.sent:
            return None
        return self.sent[0][0], max(self.sent[0][0], self.heard[-1][0] if self.heard else 0.0)

    @property
    def unheard_s(self) -> float:
        if self.truncated_s is None or not self.sent:
            return 0.0
        return max(0.0, self.sent[-1][1] - (self.heard[-1][1] if self.heard else 0.0))


def spans(timeline: Timeline, which: tuple[set[str], set[str]]) -> list[Span]:
    """The spans between these events; an open span ends with the timeline."""
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
    """The spans of each class of a stage's requests, and those in which they were paused."""
    found: dict[str, list[Span]] = {name: [] for name in (*CLASSES, "paused")}
    open_class: tuple[str, float] | None = None
    paused_s: float | None = None

    def close(at_s: float) -> None:
        nonlocal open_class, paused_s
        if open_class is not None:
            found[open_class[0]].append((open_class[1], at_s))
        if paused_s is not None:
            found["paused"].append((paused_s, at_s))
        open_class = paused_s = None

    for event in timeline.events:
        if event.event in ("response_created", "response_done", *ENDS):
            close(event.t_s)
        if event.event != "stream" or event.stage != stage:
            continue
        if event.what in CLASSES:
            if open_class is not None:
                found[open_class[0]].append((open_class[1], event.t_s))
            open_class = event.what, event.t_s
        elif event.what in PAUSES:
            paused_s = event.t_s
        elif paused_s is not None:
            found["paused"].append((paused_s, event.t_s))
            paused_s = None
    close(timeline.end_s)
    return found


def marks(timeline: Timeline, name: str) -> list[float]:
    return [event.t_s for event in timeline.events if event.event == name]


def stall_spans(timeline: Timeline) -> list[Span]:
    """Stalls: spans in which the user waited in the middle of a response."""
    underruns = [event for event in timeline.events if event.event == "underrun"]
    if underruns:
        return [(event.t_s - (event.silent_s or 0.0), event.t_s) for event in underruns]
    found = []
    stopped: TimelineEvent | None = None
    for event in timeline.events:
        # Playback also stops at the end of a response; only if it goes on was it a stall.
        is_playing = event.event == "playing"
        if is_playing and stopped is not None and stopped.response == event.response:
            found.append((stopped.t_s, event.t_s))
        if event.event in ("dry", "playing"):
            stopped = None if is_playing else event
    return found


def response_curves(timeline: Timeline) -> list[ResponseCurve]:
    """The responses in the order in which they began.

    An event without a response belongs to the latest one.
    """
    curves: dict[str, ResponseCurve] = {}
    latest: str | None = None
    for event in timeline.events:
        latest = event.response or latest
        if event.response is not None and event.response not in curves:
            curves[event.response] = ResponseCurve(event.response, event.t_s)
        if latest is not None:
            _add(curves[latest], event)
    for curve in curves.values():
        _play_out(curve)
    return [curve for curve in curves.values() if curve.sent or curve.done_s is not None]


def _add(curve: ResponseCurve, event: TimelineEvent) -> None:
    # After a truncation the user's device is silent; later events only report on it.
    if curve.truncated_s is None:
        if event.event == "first_audio" and event.sent_s is None:
            curve.sent.append((event.t_s, 0.0))
        for points, value in (
            (curve.generated, event.generated_s),
            (curve.sent, event.sent_s),
            (curve.heard, event.heard_s),
        ):
            if value is not None:
                points.append((event.t_s, value))
        if event.event in ENDS:
            curve.truncated_s = event.t_s
    if event.event == "response_done":
        curve.done_s = event.t_s


def _play_out(curve: ResponseCurve) -> None:
    """Extend the curves to the time at which all sent audio is heard, unless it was truncated."""
    if not curve.sent or curve.truncated_s is not None:
        return
    last_s, heard_s = curve.heard[-1] if curve.heard else (curve.sent[0][0], 0.0)
    left_s = curve.sent[-1][1] - heard_s
    if left_s > 0:
        end_s = last_s + left_s
        curve.heard.append((end_s, curve.sent[-1][1]))
        curve.sent.append((max(end_s, curve.sent[-1][0]), curve.sent[-1][1]))
