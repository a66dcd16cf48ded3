"""Bound on flex requests: a number of them at once, some that wait for a place, and no others.

In: flex requests of HTTP clients. Out: a place, or FlexBusyError.
Owner: one FlexGate per process for clients, and one for lines of batches. Flex requests take no
session and admission does not count them; without a bound they would fill the stages' rows.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sglang_live.errors import LiveError
from sglang_live.settings import Count, Positive, Settings, Whole, flag

# About the time of a flex response beside listeners.
_RETRY_AFTER_S = 30.0


class FlexBusyError(LiveError):
    """No place for a flex request at this moment."""

    code = "flex_busy"
    http_status = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexConfig(Settings):
    """
    waiting: further ones that wait for a place.
    wait_s: longest wait for a place.
    run_s: longest time of a written response, from its place on.
    """

    at_once: Count = flag(
        32,
        "HTTP requests of service tier flex that run at the same time; others wait",
        name="flex-at-once",
    )
    waiting: Whole = 256
    wait_s: Positive = 600.0
    run_s: Positive = 3600.0


class FlexGate:
    """
    Args:
        counted: called with the outcome of each request: `served`, `refused` or `expired`.
    Attributes:
        n_running: requests that have a place.
    """

    def __init__(
        self, config: FlexConfig, counted: Callable[[str], None] = lambda outcome: None
    ) -> None:
        self.config = config
        self._counted = counted
        self.n_running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> None:
        """Take a place, in the order of arrival. Each return needs one leave().

        Raises:
            FlexBusyError: too many wait already, or none became free in time.
        """
        if self.n_running < self.config.at_once and not self._waiting:
            self.n_running += 1
        elif len(self._waiting) < self.config.waiting:
            await self._wait()
        else:
            self._counted("refused")
            raise FlexBusyError(
                f"{self.n_running} flex requests run and {self.n_waiting} wait: no more may.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._counted("served")

    def leave(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.n_running -= 1

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        await self.enter()
        try:
            yield
        finally:
            self.leave()

    async def _wait(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self.config.wait_s):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self.leave()  # the place came at the moment of the timeout or the cancellation
            elif place in self._waiting:
                self._waiting.remove(place)
            if not isinstance(error, TimeoutError):
                raise
            self._counted("expired")
            raise FlexBusyError(
                f"No place for a flex request became free within {self.config.wait_s:g} s.",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
