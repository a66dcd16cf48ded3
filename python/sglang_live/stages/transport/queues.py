"""Limits of the queues between the two ends of a stage's socket, and how often they were met.

A job's streamed messages have a window each way; all messages of a peer share a queue.
A full queue never drops a message silently: its sender waits, or the job fails, or the stage is
started anew.
"""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from prometheus_client.core import CounterMetricFamily, Metric

from sglang_live.errors import LiveError
from sglang_live.messages import STREAMED

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
        self._every = every
        self._taken = 0

    def took_one(self) -> int:
        """Returns the credit to send now; 0: none."""
        self._taken += 1
        if self._taken < self._every:
            return 0
        due, self._taken = self._taken, 0
        return due


# Messages that wait for one peer, in each direction and at each end. Streamed messages have their
# windows: a server of 250 sessions fills the queue only when its peer reads nothing.
QUEUE_MESSAGES = 16_384
# Unread messages of one job, without the streamed ones.
UNREAD_MESSAGES = 4_096
# Seconds that a sender waits for a peer that does not read.
PATIENCE_S = 10.0
_RETRY_S = 0.02
# After this many messages other tasks run, because a socket may always have another message. Fewer
# than a window: a job's task starts before the job can have more messages than its window.
READ_AT_ONCE = WINDOW // 2


class QueueFullError(LiveError):
    """The peer does not read what is sent to it."""

    code = "queue_full"
    http_status = 503


class FloodedError(LiveError):
    """The peer sent more messages of a job than its window allows."""

    code = "flooded"


@dataclass(slots=True, eq=False)
class QueueCounts:
    """
    full: messages for which there was no room in time.
    flooded: jobs whose peer sent more than its window.
    """

    full: int = 0
    flooded: int = 0

    def collect(self) -> Iterator[Metric]:
        """For a prometheus_client registry."""
        name, doc = "sglang_live_stage_queue_limits", "Limits of queues to stages that were met."
        family = CounterMetricFamily(name, doc, labels=["what"])
        family.add_metric(["full"], self.full)
        family.add_metric(["flooded"], self.flooded)
        yield family


def bound(socket: zmq.Socket[Any]) -> None:
    """Bound the queues of a socket that has not been bound or connected yet."""
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)


def try_send(socket: zmq.asyncio.Socket, parts: list[Any]) -> bool:
    """Returns False if the queue is full. Raises ZMQError if there is no such peer."""
    sent = socket.send_multipart(parts, flags=zmq.NOBLOCK)
    assert isinstance(sent, asyncio.Future)
    error = sent.exception()  # it is done: a send with NOBLOCK never waits
    if isinstance(error, zmq.Again):
        return False
    if error is not None:
        raise error
    return True


async def send_in_time(socket: zmq.asyncio.Socket, parts: list[Any], patience_s: float) -> bool:
    """As try_send, but tries until there is room: a ROUTER cannot say for which peer it has."""
    for _ in range(max(1, round(patience_s / _RETRY_S))):
        if try_send(socket, parts):
            return True
        await asyncio.sleep(_RETRY_S)
    return False


class Unread:
    """Messages of one job that were received and not read."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[tuple[Any, list[bytes]]] = asyncio.Queue()
        self._n_streamed = 0

    def put(self, message: Any, frames: list[bytes]) -> bool:
        """Returns False, without keeping the message, if the peer sent more than its limit."""
        is_streamed = isinstance(message, STREAMED)
        n_others = self._items.qsize() - self._n_streamed
        if self._n_streamed >= WINDOW if is_streamed else n_others >= UNREAD_MESSAGES:
            return False
        self._n_streamed += is_streamed
        self._items.put_nowait((message, frames))
        return True

    def end(self, last: Any) -> None:
        """Put `last` behind all messages that have come."""
        self._items.put_nowait((last, []))

    async def take(self) -> tuple[Any, list[bytes]]:
        message, frames = await self._items.get()
        self._n_streamed -= isinstance(message, STREAMED)
        return message, frames

    def drain(self) -> list[Any]:
        """Remove and return all messages that were not read."""
        messages = []
        while not self._items.empty():
            messages.append(self._items.get_nowait()[0])
        self._n_streamed = 0
        return messages
