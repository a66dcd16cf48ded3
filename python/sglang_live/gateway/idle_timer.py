"""Timer for a user who stays silent after a response.

Owner: one IdleTimer per connection.
"""

import asyncio
from collections.abc import Callable

from sglang_live.aio import background
from sglang_live.clock import Clock


class IdleTimer:
    def __init__(self, clock: Clock, on_idle: Callable[[], None]):
        self._clock = clock
        self._on_idle = on_idle
        self._task: asyncio.Task[None] | None = None

    @property
    def armed(self) -> bool:
        return self._task is not None

    def arm(self, delay_s: float) -> None:
        """Call on_idle once after delay_s, unless disarmed or armed again."""
        self.disarm()
        self._task = background(self._wait(delay_s), "idle timer")

    def disarm(self) -> None:
        if self._task:
            self._task.cancel()
            self._task = None

    async def _wait(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        self._task = None  # on_idle may arm again and must not cancel its own task
        self._on_idle()
