"""Clocks: code that waits or measures gets one, so that tests can control time."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A time that only grows, and waiting for it."""

    def now_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class SimClock:
    """A clock that a test or a simulation advances."""

    def __init__(self, start_s: float = 0.0):
        self._now_s = start_s
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        wake = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now_s + seconds, wake))
        await wake

    def advance(self, seconds: float) -> None:
        """Move time forward and wake every sleeper that is due, in order."""
        self._now_s += seconds
        due = sorted((s for s in self._sleepers if s[0] <= self._now_s), key=lambda s: s[0])
        self._sleepers = [s for s in self._sleepers if s[0] > self._now_s]
        for _, wake in due:
            if not wake.done():
                wake.set_result(None)
