"""Audio that does not come.

Owner: the connection's TurnTaking.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_live.aio import background
from sglang_live.clock import Clock

# Without audio for as long, the user of a turn is silent. Longer than a network's pauses.
_LEAST_MISSING_S = 2.0
# After a time in which the event loop was busy, audio that has arrived is read first.
_GRACE_S = 0.2


class MissingAudio:
    """A client that stops sending in the middle of a turn: missing audio is silence.

    Clients with voice detection of their own send nothing in silence, a muted one may stop in
    mid-word.
    """

    def __init__(self, clock: Clock, on_missing: Callable[[], None]) -> None:
        """on_missing: called once when no audio has come for the time that is waited for."""
        self._clock = clock
        self._on_missing = on_missing
        self._last_s = 0.0
        self._limit_s = _LEAST_MISSING_S
        self._is_reading = False
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Audio is there, and being read."""
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False

    def heard(self, silence_s: float) -> None:
        """Audio came, and its turn goes on. silence_s: what ends the turn."""
        self._last_s = self._clock.now_s()
        self._limit_s = max(_LEAST_MISSING_S, silence_s)
        if self._task is None:
            self._task = background(self._watch(), "missing audio")

    def stop(self) -> None:
        """The session ends."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self) -> None:
        while (left_s := self._last_s + self._limit_s - self._clock.now_s()) > 0:
            await self._clock.sleep(left_s)
            await self._clock.sleep(_GRACE_S)
        self._task = None
        if not self._is_reading:
            self._on_missing()
