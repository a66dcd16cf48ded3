"""Flow control: how many streamed messages of a job may be in flight at once."""

import asyncio
import math

# Messages in flight per job and direction, and messages per credit.
WINDOW = 64
CREDIT_EVERY = 16


class SendWindow:
    """The sender's side: `take` waits while the receiver is WINDOW messages behind."""

    def __init__(self, size: int = WINDOW):
        self._left: float = size
        self._open = asyncio.Event()
        self._open.set()

    async def take(self) -> None:
        while self._left <= 0:
            self._open.clear()
            await self._open.wait()
        self._left -= 1

    def add(self, n: float) -> None:
        self._left += n
        self._open.set()

    def lift(self) -> None:
        """Let every sender go on, because the receiver takes no more messages."""
        self.add(math.inf)


class ReceiveCount:
    """The receiver's side: counts until a credit is due."""

    def __init__(self, every: int = CREDIT_EVERY):
        self._every, self._taken = every, 0

    def took_one(self) -> int:
        """Returns the credit to send now; 0: none."""
        self._taken += 1
        if self._taken < self._every:
            return 0
        due, self._taken = self._taken, 0
        return due
