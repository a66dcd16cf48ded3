"""The simulation's clock, what happens next, and devices whose time is booked.

Owner: one Events per run. Deterministic: of events at the same time the one that was added first
happens first.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable

from sglang_live.clock import SimClock

Act = Callable[[], None]


class Events(SimClock):
    """A clock for the server's own classes, which read it, and a queue that advances it."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[tuple[float, int, Act]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, act: Act) -> None:
        """Have `act` called at a time; at once if it is in the past."""
        heapq.heappush(self._queue, (max(time_s, self._now_s), next(self._numbers), act))

    def after(self, delay_s: float, act: Act) -> None:
        self.at(self._now_s + delay_s, act)

    def run(self, until_s: float = float("inf")) -> None:
        """Advance from event to event until there is none, or the next is later than until_s."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self._now_s, _, act = heapq.heappop(queue)
            act()


class Device:
    """A modelled device: work of all stages that share it, first come, first served.

    Work begins when it is launched, or when the work before it has ended. What it costs is in
    sglang_live.extensions.planner.device_model.

    Attributes:
        busy_s: duration of all work, by stage.
    """

    def __init__(self) -> None:
        self._free_s = 0.0
        self.busy_s: dict[str, float] = defaultdict(float)

    def book(
        self, stage: str, cost_s: float, launched_s: float, not_before_s: float = 0.0
    ) -> float:
        """Append work. Returns the time at which it ends, not_before_s at the earliest."""
        self._free_s = max(max(launched_s, self._free_s) + cost_s, not_before_s)
        self.busy_s[stage] += cost_s
        return self._free_s
