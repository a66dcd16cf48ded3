"""Back-pressure: how many streamed messages of a job may be under way at once."""

import asyncio
import math

# Messages in flight per job and direction, and how many are taken before the sender is told.
WINDOW = 64
CREDIT_EVERY = 16


class SendWindow:
    """Sender's side: `take` waits while the receiver is WINDOW messages behind."""

    def __init__(self, size: int = WINDOW):
        self._left: float = size
        self._open = asyncio.Event()
        self._open.set()

    async def take(self) -> None:
        while self._left <= 0:
            self._open.clear()
            await self._open.wait()
        self._left -= 1

    def give(self, n: float) -> None:
        self._left += n
        self._open.set()

    def lift(self) -> None:
        """The receiver takes no more messages: nobody shall wait for it."""
        self.give(math.inf)


class ReceiveCount:
    """Receiver's side: says when a credit is due."""

    def __init__(self, every: int = CREDIT_EVERY):
        self._every, self._taken = every, 0

    def took_one(self) -> int:
        """Credit to send now; 0 for none."""
        self._taken += 1
        if self._taken < self._every:
            return 0
        due, self._taken = self._taken, 0
        return due
