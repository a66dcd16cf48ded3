"""A modelled device's clock: when the work that stages give it begins and ends.

Work queues: it begins when it is launched, or when what was launched before it has ended, whichever
stage that came from. A real GPU without MPS gives the processes that share it time slices of a few
milliseconds in turn instead, so that a short batch of one stage ends before a long one of another;
here it waits for the long one. Each direction of the link is a queue of its own.
A file in the server's run directory, which all stages of a device map, has the end of each queue
and the counters of each stage. Time is time.monotonic(): real, and one clock for all processes.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

COMPUTE, TO_DEVICE, TO_HOST, TO_PEER, FROM_PEER = range(5)
_QUEUES = 8
COUNTERS = (
    "batches",
    "late_batches",
    "late_s",
    "modelled_s",
    "queued_s",
    "computed_s",
    "waited_s",
)
STAGES = ("thinker", "talker", "vocoder")
_MAX_REPLICAS = 64
# A thread that sleeps wakes up this much late on an idle machine.
TOLERANCE_S = 1e-3


@dataclass(slots=True)
class Work:
    """One piece of work on a queue.

    Attributes:
        began_s, done_s: when it begins and ends.
    """

    began_s: float
    done_s: float


class DeviceClock:
    """
    Args:
        path: of the file, which is created if absent.
        stage, replica: whose counters these are.
    Raises:
        ValueError: the replica's number exceeds the file's size.
    """

    def __init__(self, path: Path, stage: str, replica: int):
        if not 0 <= replica < _MAX_REPLICAS:
            raise ValueError(f"at most {_MAX_REPLICAS} replicas of a stage, got number {replica}")
        place = STAGES.index(stage) * _MAX_REPLICAS + replica
        n = _QUEUES + len(STAGES) * _MAX_REPLICAS * len(COUNTERS)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._lock, 8 * n)
        cells = np.frombuffer(mmap.mmap(self._lock, 8 * n), np.float64)
        self._free_s = cells[:_QUEUES]
        self._counts = cells[_QUEUES:].reshape(-1, len(COUNTERS))[place]

    def book(
        self, queue: int, cost_s: float, *, launched_s: float, not_before_s: float = 0
    ) -> Work:
        """Append work to a queue.

        Args:
            not_before_s: earliest end, if the work waits for something else while it is computed.
        """
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            began_s = max(launched_s, float(self._free_s[queue]))
            done_s = max(began_s + cost_s, not_before_s)
            self._free_s[queue] = done_s
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        return Work(began_s, done_s)

    def count(self, launched_s: float, work: Work, asked_s: float, noticed_s: float) -> None:
        """Count a batch whose result was awaited.

        Args:
            asked_s, noticed_s: when the wait for its result began and ended.
        """
        counts = self._counts
        late_s = noticed_s - work.done_s
        counts[0] += 1
        if late_s > TOLERANCE_S:
            counts[1] += 1
            counts[2] += late_s
        counts[3] += work.done_s - work.began_s
        counts[4] += work.began_s - launched_s
        counts[6] += noticed_s - asked_s

    def count_computation(self, seconds: float) -> None:
        """Count the time that the small model took for a batch."""
        self._counts[5] += seconds

    def report(self) -> dict[str, float]:
        """The counters of this stage, also in another process than the one that counts."""
        return {f"device_{name}": float(n) for name, n in zip(COUNTERS, self._counts, strict=True)}


class ModelledEvent:
    """Takes the role of a device event that ends with a piece of work.

    Args:
        arrive: runs once, when a reader first observes the end, with the times when that reader
            began to wait and ended.
    """

    def __init__(self, work: Work, arrive: Callable[[float, float], None] | None = None):
        self.work = work
        self._arrive = arrive

    def query(self) -> bool:
        now_s = time.monotonic()
        if now_s < self.work.done_s:
            return False
        self._observed(now_s)
        return True

    def synchronize(self) -> None:
        asked_s = time.monotonic()
        while (left_s := self.work.done_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self._observed(asked_s)

    def wait(self, stream: Any = None) -> None:
        self.synchronize()

    def record(self, stream: Any = None) -> None:
        """The work is booked already."""

    def elapsed_time(self, end: "ModelledEvent") -> float:
        """Milliseconds, the unit of torch's events, between the ends of two pieces of work."""
        return 1000 * (end.work.done_s - self.work.done_s)

    def _observed(self, asked_s: float) -> None:
        arrive = self._arrive
        self._arrive = None
        if arrive is not None:
            arrive(asked_s, time.monotonic())
