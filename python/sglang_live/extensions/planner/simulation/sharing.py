"""A device that processes share as NVIDIA's GPUs do, instead of one queue for all of their work.

Without MPS the processes with work have the device in turn, for a time slice each. With MPS all of
them compute at once, and slow each other down. The work of one process is a queue in both. What it
costs to change from one process to another is left out.
"""

from collections import deque
from typing import Literal

from sglang_live.extensions.planner.simulation.events import Device, Events, Work

Sharing = Literal["queue", "time-slices", "mps"]
SHARINGS: tuple[Sharing, ...] = ("queue", "time-slices", "mps")
# The default of a channel group in NVIDIA's driver: 128 << 3 microseconds
# (kfifoChannelGroupGetDefaultTimeslice_GV100 of open-gpu-kernel-modules, for Volta and later).
SLICE_S = 1.024e-3
# Estimate: what several processes compute together, over what one computes alone. Prefills beside
# decode rounds on one GPU are 1.26 times as much as in turn (Bullet, arXiv 2504.19516). 1 if all
# of them need the same part of the device.
TOGETHER = 1.2
# Below it work is done: times are sums of floats.
_NOTHING_S = 1e-9


class _Part(Work):
    """Work of which left_s is to be computed."""

    def __init__(self, events: Events, left_s: float, not_before_s: float):
        super().__init__(events)
        self.left_s = left_s
        self.not_before_s = not_before_s


class SharedDevice(Device):
    """
    Args:
        by_slices: processes have it in turn; otherwise all at once.
    """

    def __init__(self, events: Events, *, by_slices: bool):
        super().__init__(events)
        self._by_slices = by_slices
        # Of processes with work. The first one has the slice, which is over at _slice_ends_s.
        self._queues: dict[str, deque[_Part]] = {}
        self._slice_ends_s = 0.0
        self._counted_s = self._stalled_until_s = 0.0
        self._plan_number = 0

    def book(self, stage: str, cost_s: float, launched_s: float, not_before_s: float = 0.0) -> Work:
        """Work of a process, which is known by its stage."""
        super().book(stage, cost_s, launched_s, not_before_s)
        work = _Part(self._events, cost_s, not_before_s)
        self._events.at(launched_s, lambda: self._begin(stage, work))
        return work

    def stall(self, for_s: float) -> None:
        """No process computes for a while."""
        self._count()
        self._stalled_until_s = max(self._events.now_s(), self._stalled_until_s) + for_s
        self._plan()

    @property
    def _computing(self) -> list[str]:
        return list(self._queues)[: 1 if self._by_slices else None]

    @property
    def _speed(self) -> float:
        """Of each process that computes, 1 if it were alone."""
        n = len(self._computing)
        return 1.0 if n == 1 else TOGETHER / n

    def _begin(self, stage: str, work: _Part) -> None:
        self._count()
        if not self._queues:
            self._slice_ends_s = self._events.now_s() + SLICE_S
        self._queues.setdefault(stage, deque()).append(work)
        self._plan()

    def _count(self) -> None:
        """Account for what was computed since the last time."""
        now_s = self._events.now_s()
        spent_s = max(0.0, now_s - max(self._counted_s, self._stalled_until_s))
        self._counted_s = now_s
        for stage in self._computing:
            self._queues[stage][0].left_s -= spent_s * self._speed

    def _plan(self) -> None:
        """Wake up when the first work is done, or a slice is over that another process waits
        for."""
        self._plan_number += 1
        number = self._plan_number
        if not self._queues:
            return
        left_s = min(self._queues[stage][0].left_s for stage in self._computing)
        begins_s = max(self._events.now_s(), self._stalled_until_s)
        next_s = begins_s + left_s / self._speed
        if self._by_slices and len(self._queues) > 1:
            next_s = min(next_s, self._slice_ends_s)
        self._events.at(next_s, lambda: self._wake(number))

    def _wake(self, number: int) -> None:
        if number != self._plan_number:
            return
        now_s = self._events.now_s()
        self._count()
        for stage in self._computing:
            queue = self._queues[stage]
            if queue[0].left_s < _NOTHING_S:
                work = queue.popleft()
                work.end(max(now_s, work.not_before_s))
            is_over = self._by_slices and now_s >= self._slice_ends_s
            if not queue or is_over:
                del self._queues[stage]
                self._slice_ends_s = now_s + SLICE_S
            if queue and is_over:
                self._queues[stage] = queue  # behind the others
        self._plan()
