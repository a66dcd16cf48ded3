"""What is recorded of a load: the turns of its users, and the messages of storms beside them."""

from dataclasses import asdict, dataclass
from typing import Any

from sglang_live.extensions.planner.simulation.load.interruptions import PlannedInterruption
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """A turn of a user. Times are seconds since the start of the load.

    planned: the interruption that was drawn for it; `record.interruption` is set if the response
        was still playing at its moment.
    """

    user: int
    turn: int
    clip: str
    response_gap_s: float
    start_s: float
    end_s: float
    record: TurnRecord
    planned: PlannedInterruption | None = None

    def to_json(self) -> dict[str, Any]:
        apart = ("record", "planned")
        place = {name: getattr(self, name) for name in self.__slots__ if name not in apart}
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in place.items()}
        planned = None
        if self.planned is not None:
            planned = {**asdict(self.planned), "after_s": round(self.planned.after_s, 3)}
        return {**rounded, "planned": planned, **self.record.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StormRow:
    """One message of a storm.

    start_s: time since the start of the load.
    """

    wave: int
    session: int
    start_s: float
    record: TurnRecord

    @property
    def ok(self) -> bool:
        # Responses end at their token limit by design.
        return self.record.status in ("completed", "incomplete")

    def to_json(self) -> dict[str, Any]:
        record = self.record.to_json()
        kept = {key: record[key] for key in ("status", "error", "ttft_ms", "transcript")}
        place = {"wave": self.wave, "session": self.session, "start_s": round(self.start_s, 3)}
        return {**place, **kept}
