"""An engine's turns on a device that it shares with other stages (policy/arbiter.py).

A round without a turn plans nothing: it only finds out whether there is work, and by when that
should begin. With the turn the engine decides anew and launches one batch. Its turn ends when that
is computed, before it reads the result, or a little before: the next stage launches meanwhile. Rank
0 has the connection; the turn is broadcast.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import NextBatchPlan, ScheduleBatch

from sglang_live.bridge.rate_meter import expected_s
from sglang_live.bridge.scheduler.deciding import Deciding
from sglang_live.bridge.scheduler.part import Part, Prefill
from sglang_live.engine_channel.device_turn import DeviceTurn

if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler

# After a turn in which no batch could begin, such as for want of memory; and the longest wait for
# one without a new decision.
_FRUITLESS_S = 0.02


@dataclass(frozen=True, slots=True)
class Turn:
    """Whether the engine has the device in this round."""

    granted: bool


class ByTurns(Part):
    """The last of the parts that decide: what the others allow is work.

    Attributes:
        has_work: of the present round.
    """

    def __init__(self, scheduler: "LiveScheduler"):
        super().__init__(scheduler)
        self._granted = False
        self.has_work = False

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {Turn: self._on_turn}

    def _on_turn(self, turn: Turn) -> None:
        self._granted = turn.granted

    def before_round(self) -> None:
        self.has_work = False

    def narrow(self, prefill: Prefill) -> None:
        if prefill.budget != 0 and (prefill.queue or self._scheduler.partial_prefills()):
            self.has_work = True
            if not self._granted:
                prefill.at_most(0)

    def holds_decode(self) -> bool:
        self.has_work = True
        return not self._granted

    def awaits_input(self) -> bool:
        return self.has_work and not self._granted


class Asking(Part):
    """Rank 0's connection to the arbiter.

    Args:
        deciding: None: no policy decides about rounds.
    """

    def __init__(
        self,
        scheduler: "LiveScheduler",
        by_turns: ByTurns,
        turn: DeviceTurn,
        deciding: Deciding | None,
    ):
        super().__init__(scheduler)
        self._by_turns = by_turns
        self._turn = turn
        self._deciding = deciding
        self._watched: int | None = None
        self._not_before_s = 0.0
        self._computed: Any = None

    def before_feeds(self) -> None:
        """A round before the turn would plan nothing: wait for it, or for a message that may bring
        the deadline forward."""
        if self._turn.asks and not self._turn.poll():
            self._scheduler.channel.wait(_FRUITLESS_S)

    def feeds(self, now_s: float) -> list[Any]:
        return [Turn(self._turn.poll())]

    def planned(self, plan: NextBatchPlan) -> None:
        self._plan_turn(plan)
        self._watch()

    def _plan_turn(self, plan: NextBatchPlan) -> None:
        if plan.batch_to_run is not None:
            return
        if self._turn.has:
            self._turn.release()
            self._not_before_s = time.monotonic() + _FRUITLESS_S
        elif not self._by_turns.has_work:
            self._turn.release()
        elif time.monotonic() >= self._not_before_s:
            self._ask()

    def launched(self, batch: ScheduleBatch, result: Any) -> None:
        self._computed = getattr(result, "copy_done", None)
        if self._computed is None and self._scheduler.device != "cpu":
            self._computed = self._scheduler.device_module.Event()
            self._computed.record()
        deciding = self._deciding
        if deciding is not None and (launch := deciding.launch) is not None:
            self._turn.ends_at(launch.at_s + expected_s(launch.work, deciding.rounds.rates))

    def before_result(self, result: Any) -> None:
        if self._computed is not None:
            self._computed.synchronize()
            self._computed = None
        self._turn.release()

    def after_result(self) -> None:
        # What runs now, will in the next round: its turn may come while this one's result is read.
        if not self._scheduler.running_batch.is_empty():
            self._ask()

    def wait_limit_s(self) -> float:
        return max(0.0, self._not_before_s - time.monotonic()) or float("inf")

    def totals(self) -> dict[str, float]:
        return self._turn.counts

    def _ask(self) -> None:
        # Where no policy knows of rounds, the device is first come, first served.
        deadline_s = min(part.deadline_s() for part in self._scheduler.parts)
        self._turn.ask(time.monotonic() if deadline_s == float("inf") else deadline_s)

    def _watch(self) -> None:
        """Have a grant end the loop's wait for input."""
        connection = self._turn.socket
        now = None if connection is None else connection.fileno()
        if now != self._watched:
            if self._watched is not None:
                self._scheduler.channel.no_wake_on(self._watched)
            if now is not None:
                self._scheduler.channel.wake_on(now)
            self._watched = now
