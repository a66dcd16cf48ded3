"""A session as a trace: what its timeline says, in OTLP's JSON form (opentelemetry-proto 1.x).

Pure. The id of the trace follows from that of the session, so a session is found by its id in the
logs of all processes, and by its trace in a collector.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
_INTERNAL, _ERROR = 1, 2  # SpanKind, StatusCode
# Of a response: what happens within it.
_WITHIN = ("first_audio", "underrun", "barge_in", "stopped", "truncated", "held", "released")
# Work of a stage: from a mark of the turn (telemetry/trace.py) to another, with one between them.
# The talker begins with the first token that it gets, the vocoder with the first frame.
_STAGES = (
    ("thinker", "", "thinker_first_token", "thinker_done"),
    ("talker", "thinker_first_token", "talker_first_frame", "talker_done"),
    ("vocoder", "talker_first_frame", "first_audio", "turn_done"),
)


def trace_id(session_id: str) -> str:
    return hashlib.blake2b(session_id.encode(), digest_size=16).hexdigest()


@dataclass(slots=True)
class _Spans:
    session_id: str
    began_unix_s: float
    made: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        name: str,
        from_s: float,
        to_s: float,
        parent: str = "",
        events: list[dict[str, Any]] | None = None,
        **facts: Any,
    ) -> str:
        """Returns its id."""
        seed = f"{self.session_id} {len(self.made)}"
        span_id = hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()
        failed = facts.get("status") == "failed"
        self.made.append(
            {
                "traceId": trace_id(self.session_id),
                "spanId": span_id,
                "parentSpanId": parent,
                "name": name,
                "kind": _INTERNAL,
                "startTimeUnixNano": self._nanoseconds(from_s),
                "endTimeUnixNano": self._nanoseconds(max(from_s, to_s)),
                "attributes": _attributes(facts),
                "events": events or [],
                "status": {"code": _ERROR} if failed else {},
            }
        )
        return span_id

    def event(self, name: str, at_s: float, **facts: Any) -> dict[str, Any]:
        return {
            "timeUnixNano": self._nanoseconds(at_s),
            "name": name,
            "attributes": _attributes(facts),
        }

    def _nanoseconds(self, at_s: float) -> str:
        return str(round((self.began_unix_s + at_s) * 1e6) * 1000)


def export(timeline: Mapping[str, Any], host: str) -> dict[str, Any]:
    """The body of a POST to a collector's /v1/traces.

    Args:
        timeline: see interaction/timeline.py.
    """
    events: list[Event] = timeline["events"]
    spans = _Spans(timeline["session"], timeline["began_unix_s"])
    last_s = max((event["t_s"] for event in events), default=0.0)
    facts = {"session.id": timeline["session"], "events_dropped": timeline["dropped"]}
    root = spans.add("session", 0.0, last_s, **facts)
    speaks_since_s: float | None = None
    responses: dict[str, list[Event]] = {}
    for event in events:
        if event["event"] == "speech_started":
            speaks_since_s = event["onset_t_s"]
        elif event["event"] == "speech_stopped" and speaks_since_s is not None:
            spans.add("user speaks", speaks_since_s, event["t_s"], root, reason=event["reason"])
            speaks_since_s = None
        elif "response" in event:
            responses.setdefault(event["response"], []).append(event)
    for response_id, own in responses.items():
        _add_response(spans, root, response_id, own)
    resource = {"service.name": "sglang_live", "host.name": host}
    scope = {"scope": {"name": "sglang_live.timeline"}, "spans": spans.made}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}
        ]
    }


def _add_response(spans: _Spans, root: str, response_id: str, events: list[Event]) -> None:
    named = {event["event"]: event for event in events}
    within = [
        spans.event(one["event"], one["t_s"], **_more(one))
        for one in events
        if one["event"] in _WITHIN
    ]
    begin_s, end_s = events[0]["t_s"], named.get("response_done", events[-1])["t_s"]
    facts = {"response": response_id} | _more(named.get("response_done", {}))
    parent = spans.add("response", begin_s, end_s, root, within, **facts)
    result = named.get("turn_result", {})
    marks = result.get("marks", {})
    if "turn_done" not in marks:
        return
    began_s = result["t_s"] - marks["turn_done"]
    for name, begin, middle, end in _STAGES:
        if end in marks and (begin in marks or not begin):
            reached = [spans.event(middle, began_s + marks[middle])] if middle in marks else []
            spans.add(name, began_s + marks.get(begin, 0.0), began_s + marks[end], parent, reached)


def _more(event: Event) -> dict[str, Any]:
    """What an event says beside its time, its name and its response."""
    return {k: v for k, v in event.items() if k not in ("t_s", "event", "response")}


def _attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items()]


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
