"""Grants of a device that several stages share, one stage at a time.

One piece of work is on the device, a prefill, a decode round or a batch of chunks, and at most one
more is about to begin. A stage asks with the time by which it should have begun; the device is
granted to the earliest. A stage decides what to compute only then, with the newest facts, so that
no work waits behind what was launched before it was known to matter.

Deadlines are absolute and none is infinite, so the longer a stage has waited, the sooner its turn:
work without a listener waits for at most `unheard_s` and what was due before.
"""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sglang_live.settings import NonNegative, Positive, Settings

# Between a grant and the launch of what was granted, before any was measured; at most, so that a
# kernel that is compiled does not count; weight of the newest one.
FIRST_LAUNCH_S, _MOST_LAUNCH_S, _WEIGHT = 0.002, 0.01, 0.1
# The lead is longer than the slowest stage's launch by this. Simulated, a lead that is 2 ms too
# short costs a third of the users, one that is 2 ms too long nothing that is seen.
_MARGIN_S = 0.001


def next_launch_s(mean_s: float, newest_s: float) -> float:
    """The mean time from a grant to a launch, with the newest one."""
    return mean_s + _WEIGHT * (min(newest_s, _MOST_LAUNCH_S) - mean_s)


def lead_s(launches_s: Iterable[float]) -> float:
    """How long before the end of the work on the device the next turn is granted.

    Until a stage has decided and launched, the device would be idle.

    Args:
        launches_s: mean of each stage.
    """
    return max(launches_s, default=FIRST_LAUNCH_S) + _MARGIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ArbiterConfig(Settings):
    """How long work may wait for the device.

    first_sound_s: that leads to a response's first sound, in an engine.
    ease_s: of streams with listeners, after the time at which the first would hear a gap if the
        next chunk were made from its beginning.
    unheard_s: that has no listener.
    """

    first_sound_s: NonNegative = 0.1
    ease_s: NonNegative = 0.1
    unheard_s: Positive = 0.5


def engine_deadline_s(now_s: float, gap_at_s: float, first: bool, config: ArbiterConfig) -> float:
    """Time by which an engine's next round should begin.

    Args:
        gap_at_s: when its first listener would hear a gap; inf: there is none.
        first: a response that has not sounded can step or begin.
    """
    deadline_s = min(gap_at_s + config.ease_s, now_s + config.unheard_s)
    return min(deadline_s, now_s + config.first_sound_s) if first else deadline_s


Asker = TypeVar("Asker", bound=Hashable)


class Turns(Generic[Asker]):
    """Who has the device, and who is next.

    Attributes:
        holder: who has it; None: it is free.
    """

    def __init__(self) -> None:
        self.holder: Asker | None = None
        self._deadlines_s: dict[Asker, float] = {}

    def ask(self, who: Asker, deadline_s: float) -> None:
        """Want a turn, or want it sooner: asking again later does not lose the place. Raises
        ValueError if the deadline is not finite, or if this asker has the device."""
        if not math.isfinite(deadline_s):
            raise ValueError(f"a deadline is finite, got {deadline_s}")
        if who == self.holder:
            raise ValueError(f"{who} asks for the device that it has")
        self._deadlines_s[who] = min(deadline_s, self._deadlines_s.get(who, math.inf))

    def next(self) -> Asker | None:
        """Grant the device if it is free: returns the new holder. Of equal deadlines, the one that
        asked first."""
        if self.holder is not None or not self._deadlines_s:
            return None
        who = min(self._deadlines_s, key=self._deadlines_s.__getitem__)
        del self._deadlines_s[who]
        self.holder = who
        return who

    def release(self, who: Asker) -> None:
        """The holder's work is done. Raises ValueError for others."""
        if who != self.holder:
            raise ValueError(f"{who} releases a device that {self.holder} has")
        self.holder = None

    def leave(self, who: Asker) -> None:
        """It wants nothing more: its process has ended, or it has no work."""
        self._deadlines_s.pop(who, None)
        if who == self.holder:
            self.holder = None
