"""A load over its time. Pure: rows in, statistics out."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_live.extensions.planner.simulation.load.rows import TurnRow
from sglang_live.extensions.planner.simulation.load.stats import continuity


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Turns in which the user stops speaking within a span of time.

    begin_s: since the start of the load.
    turns, failed: all of them, and those without a response.
    continuity: share of the responses without a gap over 100 ms, interrupted ones until playback
        stopped; None: there are none.
    """

    begin_s: float
    turns: int
    failed: int
    continuity: float | None


def spans(rows: Iterable[TurnRow], span_s: float) -> list[Span]:
    """From the start of the load to its last turn, each of them span_s long."""
    found: dict[int, list[TurnRow]] = {}
    for row in rows:
        found.setdefault(math.floor(_asked_s(row) / span_s), []).append(row)
    return [_span(n * span_s, found.get(n, [])) for n in range(max(found, default=-1) + 1)]


def most_at_once(times_s: Sequence[tuple[float, float]]) -> int:
    """Most sessions at a time. times_s: begin and end of each."""
    changes = sorted([(end, -1) for _, end in times_s] + [(begin, 1) for begin, _ in times_s])
    most = n = 0
    for _, change in changes:
        n += change
        most = max(most, n)
    return most


def _asked_s(row: TurnRow) -> float:
    return row.start_s + row.record.user_audio_s


def _span(begin_s: float, rows: list[TurnRow]) -> Span:
    responses = [row.record for row in rows if row.record.ok]
    return Span(
        begin_s=begin_s,
        turns=len(rows),
        failed=len(rows) - len(responses),
        continuity=continuity(responses),
    )
