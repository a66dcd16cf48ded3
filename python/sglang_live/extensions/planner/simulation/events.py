"""The simulation's clock, what happens next, and devices whose time is booked.

Owner: one Events per run. Deterministic: of events at the same time the one that was added first
happens first.
"""

import asyncio
import heapq
import itertools
from asyncio import TimerHandle
from collections import defaultdict
from collections.abc import Callable

from sglang_live.clock import SimClock
from sglang_live.policy.arbiter import Turns

Act = Callable[[], object]


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

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    def run(self, until_s: float = float("inf")) -> None:
        """Advance from event to event until there is none, or the next is later than until_s."""
        while self.step(until_s):
            pass

    def step(self, until_s: float) -> bool:
        """The next event. Returns False if there is none, or it is later than until_s."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            time_s, _, act = heapq.heappop(queue)
            if isinstance(act, TimerHandle) and act.cancelled():
                continue
            self._now_s = time_s
            act()
            return True
        return False


class Work:
    """One piece of work on a device.

    done_s: when its result exists; None: not known yet.
    """

    def __init__(self, events: Events, done_s: float | None = None):
        self._events = events
        self._then: tuple[Act, float] | None = None
        self.done_s = done_s

    def when_done(self, act: Act, not_before_s: float = 0.0) -> None:
        """Have `act` called when its result exists, at not_before_s at the earliest."""
        if self.done_s is None:
            self._then = act, not_before_s
        else:
            self._events.at(max(self.done_s, not_before_s), act)

    def end(self, done_s: float) -> None:
        self.done_s = done_s
        if self._then is not None:
            self.when_done(*self._then)


class Device:
    """A modelled device: work of all stages that share it, first come, first served.

    Work begins when it is launched, or when the work before it has ended. What it costs is in
    sglang_live.extensions.planner.device_model.

    Attributes:
        is_arbitrated: whether stages have it by turns.
        ends_s: when all work would have ended, one piece after the other.
        busy_s: duration of all work, by stage.
    """

    is_arbitrated = False

    def __init__(self, events: Events) -> None:
        self._events = events
        self.ends_s = 0.0
        self.busy_s: dict[str, float] = defaultdict(float)

    def book(self, stage: str, cost_s: float, launched_s: float, not_before_s: float = 0.0) -> Work:
        """Append work, which ends at not_before_s at the earliest."""
        self.ends_s = max(max(launched_s, self.ends_s) + cost_s, not_before_s)
        self.busy_s[stage] += cost_s
        return Work(self._events, self.ends_s)

    def stall(self, for_s: float) -> None:
        """Begin no work for a while; what was to begin meanwhile is late."""
        self.ends_s = max(self._events.now_s(), self.ends_s) + for_s

    def ask(self, who: object, deadline_s: float, grant: Act) -> None:
        """Have `grant` called when `who` may launch work. Asking again may bring the
        deadline forward."""
        grant()

    def leave(self, who: object) -> None:
        """It has died, and asks for nothing more."""


class ArbitratedDevice(Device):
    """A device on which `Turns` says whose work is next.

    Args:
        lead_s: for which the next turn is granted before the work on the device ends.
    """

    is_arbitrated = True

    def __init__(self, events: Events, lead_s: float, device: Device) -> None:
        super().__init__(events)
        self._device = device
        self.busy_s = device.busy_s
        self._lead_s = lead_s
        self._turns: Turns[object] = Turns()
        self._grants: dict[object, Act] = {}
        self._is_granting = self._is_busy = False

    def ask(self, who: object, deadline_s: float, grant: Act) -> None:
        self._turns.ask(who, deadline_s)
        self._grants[who] = grant
        self._grant_later()

    def book(self, stage: str, cost_s: float, launched_s: float, not_before_s: float = 0.0) -> Work:
        work = self._device.book(stage, cost_s, launched_s, not_before_s)
        self._is_busy = True
        self._events.at(self._device.ends_s - self._lead_s, self._done)
        return work

    def stall(self, for_s: float) -> None:
        self._device.stall(for_s)

    def leave(self, who: object) -> None:
        if who != self._turns.holder:  # what is on the device is computed
            self._turns.leave(who)

    def _done(self) -> None:
        self._is_busy = False
        self._turns.release(self._turns.holder)
        self._grant_later()

    def _grant_later(self) -> None:
        """What else happens at this time comes first: who has work then, asks."""
        if not self._is_granting:
            self._is_granting = True
            self._events.after(0.0, self._grant)

    def _grant(self) -> None:
        self._is_granting = False
        while (who := self._turns.next()) is not None:
            self._grants.pop(who)()
            if self._is_busy:
                return
            self._turns.release(who)  # it had no work after all
