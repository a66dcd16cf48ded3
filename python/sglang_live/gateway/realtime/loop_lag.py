"""How late the gateway's event loop is, and the refusal of sessions that would make it later.

Every microphone costs the loop some CPU time, whether its user speaks or not. With more of them
than one core serves, audio waits in the sockets, and all users are heard later and later: no event
fails. The mean delay of a timer shows it.
Owner: one LoopLag per process.
"""

import asyncio
import math
from dataclasses import replace

from sglang_live.aio import background, lasting
from sglang_live.capacity.control import Capacity
from sglang_live.clock import Clock
from sglang_live.errors import CapacityError
from sglang_live.telemetry.metrics import GatewayMetrics

_PERIOD_S = 0.05
# Time constant of the mean. A single stall of the process, up to a second, refuses no session.
_MEMORY_S = 5.0
_RETRY_AFTER_S = 5.0
_WHY = "The server cannot listen to more users now."


class LoopLag:
    """
    limit_s: mean lag at which new sessions are refused; None: they never are.
    """

    def __init__(self, clock: Clock, metrics: GatewayMetrics, limit_s: float | None):
        self._clock, self._metrics, self._limit_s = clock, metrics, limit_s
        self._mean_s = 0.0
        self._watching: asyncio.Task[None] | None = None

    @property
    def mean_s(self) -> float:
        return self._mean_s

    def start(self) -> None:
        self._watching = background(lasting(self._watch, "loop lag", self._clock), "loop lag")

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def check(self) -> None:
        """Raises CapacityError if open sessions already use the time that a new one would need."""
        if self._is_over:
            raise CapacityError(_WHY, retry_after_s=_RETRY_AFTER_S)

    def limited(self, capacity: Capacity) -> Capacity:
        """The same, without room for more sessions if they would be refused here."""
        return replace(capacity, n_more=0, why=_WHY) if self._is_over else capacity

    @property
    def _is_over(self) -> bool:
        return self._limit_s is not None and self._mean_s > self._limit_s

    def observe(self, lag_s: float) -> None:
        """Enter how late a timer of _PERIOD_S was."""
        share = -math.expm1(-(_PERIOD_S + lag_s) / _MEMORY_S)
        self._mean_s += share * (lag_s - self._mean_s)
        self._metrics.loop_lag_s.set(self._mean_s)

    async def _watch(self) -> None:
        while True:
            due_s = self._clock.now_s() + _PERIOD_S
            await self._clock.sleep(_PERIOD_S)
            self.observe(max(0.0, self._clock.now_s() - due_s))
