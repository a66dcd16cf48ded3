"""The kinds of document, distinguished by their contents, and checked.

A timeline: the server's record of a session (python/sglang_live/interaction/timeline.py).
The others: output of `python -m benchmark.NAME --json` for voice_load, kv_pressure, retention,
collapse and admission.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


class DocumentError(ValueError):
    """The file is no document that can be drawn, or a broken one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """One event. Times count from the start of the session; audio is the total of the response.

    response: its id; None: the latest response.
    silent_s: length of a stall that ends now.
    onset_t_s: start of the speech that is detected now.
    stage, what, buffered_s: a stage, its policies' decision on the response, and its buffer.
    """

    t_s: float
    event: str
    response: str | None = None
    generated_s: float | None = None
    sent_s: float | None = None
    heard_s: float | None = None
    silent_s: float | None = None
    onset_t_s: float | None = None
    stage: str | None = None
    what: str | None = None
    buffered_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The record of one session.

    dropped: number of events beyond the limit of the record.
    """

    session: str
    began_unix_s: float | None
    events: tuple[TimelineEvent, ...]
    dropped: int

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        names = TimelineEvent.__dataclass_fields__
        events = [
            TimelineEvent(**{name: event[name] for name in names if name in event})
            for event in document["events"]
        ]
        if not events:
            raise DocumentError("the timeline has no events")
        return cls(
            session=str(document["session"]),
            began_unix_s=document.get("began_unix_s"),
            events=tuple(sorted(events, key=lambda event: event.t_s)),
            dropped=int(document.get("dropped", 0)),
        )

    @property
    def end_s(self) -> float:
        return self.events[-1].t_s


@dataclass(frozen=True, slots=True)
class LoadDocument:
    """The points of benchmark.voice_load, by arm in the order of the file.

    facts: the other fields of the document.
    """

    facts: dict[str, Any]
    arms: dict[str, list[dict[str, Any]]]

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        arms: dict[str, list[dict[str, Any]]] = {}
        for point in document["points"]:
            arms.setdefault(point["policies"], []).append(point)
        if not arms:
            raise DocumentError("the document has no points")
        for points in arms.values():
            points.sort(key=place)
        return cls({k: v for k, v in document.items() if k not in ("points", "runs")}, arms)

    @property
    def open_loop(self) -> bool:
        return any(point.get("rate_rps") for points in self.arms.values() for point in points)


@dataclass(frozen=True, slots=True)
class KvPressure:
    """Rows of benchmark.kv_pressure, by arm in the order of the file."""

    facts: dict[str, Any]
    arms: dict[str, list[dict[str, Any]]]

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        arms: dict[str, list[dict[str, Any]]] = {}
        for row in document["rows"]:
            if row["ttft_all_ms"]:
                arms.setdefault(row["arm"], []).append(row)
        if not arms:
            raise DocumentError("the document has no turns")
        return cls({k: v for k, v in document.items() if k != "rows"}, arms)


@dataclass(frozen=True, slots=True)
class KvAges:
    """Measurements of benchmark.retention by the age of a session, by arm."""

    facts: dict[str, Any]
    arms: dict[str, list[dict[str, Any]]]

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        arms = {row["arm"]: row["ages"] for row in document["rows"] if row["ages"]}
        if not arms:
            raise DocumentError("the document has no ages")
        return cls({k: v for k, v in document.items() if k != "rows"}, arms)


@dataclass(frozen=True, slots=True)
class Collapse:
    """Runs of benchmark.collapse, by arm in the order of the file."""

    facts: dict[str, Any]
    arms: dict[str, list[dict[str, Any]]]

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        arms: dict[str, list[dict[str, Any]]] = {}
        for row in document["rows"]:
            arms.setdefault(row["arm"], []).append(row)
        if not arms:
            raise DocumentError("the document has no runs")
        return cls({k: v for k, v in document.items() if k != "rows"}, arms)


@dataclass(frozen=True, slots=True)
class Admission:
    """Results of benchmark.admission: N* by brute force, and open systems.

    n_star: largest number of sessions in time.
    ladder: measurements by number of sessions.
    """

    facts: dict[str, Any]
    n_star: int
    ladder: list[dict[str, Any]]
    open_systems: list[dict[str, Any]]

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        parts = ("ladder", "open_systems", "n_star")
        facts = {k: v for k, v in document.items() if k not in parts}
        if not document["open_systems"]:
            raise DocumentError("the document has no open systems")
        return cls(facts, document["n_star"], document["ladder"], document["open_systems"])


Document = Timeline | LoadDocument | KvPressure | KvAges | Collapse | Admission
_BENCHMARKS: dict[str, Callable[[dict[str, Any]], Document]] = {
    "voice_load": LoadDocument.of,
    "kv_pressure": KvPressure.of,
    "retention": KvAges.of,
    "collapse": Collapse.of,
    "admission": Admission.of,
}


def place(point: dict[str, Any]) -> float:
    """Position of a point on the axis of load."""
    load: float = point.get("rate_rps") or point["sessions"]
    return load


def read(path: Path) -> Document:
    """Raises DocumentError with the fault of the file."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise DocumentError(f"{path} is not JSON: {error}") from error
    known = document if isinstance(document, dict) else {}
    try:
        if "events" in known and "session" in known:
            return Timeline.of(known)
        if (made := _BENCHMARKS.get(str(known.get("benchmark")))) is not None:
            return made(known)
    except (KeyError, TypeError, AttributeError) as error:
        raise DocumentError(f"{path} is a broken document: {error!r}") from error
    raise DocumentError(
        f"{path} is neither a session's timeline nor a document of {', '.join(_BENCHMARKS)}"
    )
