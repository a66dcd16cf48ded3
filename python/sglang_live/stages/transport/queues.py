"""How much may wait between the two ends of a stage's socket, and the counts of what was too much.

A full queue never drops a message silently: its sender waits, or the job fails, or the stage is
started anew.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from prometheus_client.core import CounterMetricFamily, Metric

from sglang_live.errors import LiveError
from sglang_live.messages import STREAMED
from sglang_live.stages.transport.flow_control import WINDOW

# Messages that wait for one peer, in each direction and at each end. Streamed messages have their
# windows: a server of 250 calls fills it only when its peer reads nothing.
QUEUE_MESSAGES = 16_384
# Messages of one job that have come and were not taken, beside the streamed ones.
UNREAD_MESSAGES = 4_096
# How long a sender waits for a peer that does not read.
PATIENCE_S = 10.0
_LOOK_AGAIN_S = 0.02
# A socket that always has a message would keep the event loop from everything else. Fewer than a
# window: a job runs its first line before it can have more than its window.
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
    """full: messages for which there was no room in time. flooded: jobs with too many messages."""

    full: int = 0
    flooded: int = 0

    def collect(self) -> Iterator[Metric]:
        """For a prometheus_client registry."""
        name, doc = "sglang_live_stage_queue_limits", "Limits of queues to stages that were met."
        family = CounterMetricFamily(name, doc, labels=["what"])
        family.add_metric(["full"], self.full)
        family.add_metric(["flooded"], self.flooded)
        yield family


def bound(socket: zmq.Socket) -> None:
    """Before it binds or connects."""
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)


def try_send(socket: zmq.asyncio.Socket, parts: list) -> bool:
    """Returns False if the queue is full. Raises ZMQError if there is no such peer."""
    sent = socket.send_multipart(parts, flags=zmq.NOBLOCK)
    error = sent.exception()  # it is done: a send that may not block never waits
    if isinstance(error, zmq.Again):
        return False
    if error is not None:
        raise error
    return True


async def send_in_time(socket: zmq.asyncio.Socket, parts: list, patience_s: float) -> bool:
    """As try_send, but wait for room. A ROUTER cannot tell for which peer it has room: ask."""
    for _ in range(max(1, round(patience_s / _LOOK_AGAIN_S))):
        if try_send(socket, parts):
            return True
        await asyncio.sleep(_LOOK_AGAIN_S)
    return False


class Unread:
    """Messages of one job that have come and wait for their reader."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[tuple[Any, list[bytes]]] = asyncio.Queue()
        self._n_streamed = 0

    def put(self, message: Any, frames: list[bytes]) -> bool:
        """Returns False, and does not keep the message, if its sender sends more than it may."""
        is_streamed = isinstance(message, STREAMED)
        n_others = self._items.qsize() - self._n_streamed
        if self._n_streamed >= WINDOW if is_streamed else n_others >= UNREAD_MESSAGES:
            return False
        self._n_streamed += is_streamed
        self._items.put_nowait((message, frames))
        return True

    def end(self, last: Any) -> None:
        """The reader finds this behind all that has come."""
        self._items.put_nowait((last, []))

    async def take(self) -> tuple[Any, list[bytes]]:
        message, frames = await self._items.get()
        self._n_streamed -= isinstance(message, STREAMED)
        return message, frames

    def drain(self) -> list[Any]:
        """All that was not taken."""
        messages = []
        while not self._items.empty():
            messages.append(self._items.get_nowait()[0])
        self._n_streamed = 0
        return messages
