"""Bounded queue of server events for one client, in order and numbered.

In: events, from any task, never blocking. Out: text frames, one at a time.
Owner: one Outbox per connection. until_lost() returns when a client has stopped reading.
The events of a response form a lane. A held lane lets other events pass, and its unsent audio can
be discarded; frames that the network has taken cannot.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from sglang_live.ids import new_id

log = logging.getLogger(__name__)

OnSent = Callable[[], None]

# A client that has not taken a frame after one to two times this has gone. TCP itself detects only
# idle connections: a phone without signal would keep its session for hours.
_PATIENCE_S = 15.0


class Emit(Protocol):
    """Send one server event.

    Args:
        on_sent: called when the network has taken the event.
        lane: id of its response; None: it belongs to no lane.
        audio_s: seconds of audio in it; events with audio may be discarded.
        numbered: it has an event_id.
    """

    def __call__(
        self,
        event_type: str,
        /,
        on_sent: OnSent | None = None,
        lane: str | None = None,
        audio_s: float = 0.0,
        numbered: bool = True,
        **fields: Any,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Frame:
    data: bytes
    on_sent: OnSent | None
    lane: str | None
    audio_s: float


class Outbox:
    def __init__(
        self,
        send: Callable[[str], Awaitable[None]],
        limit_bytes: int,
        patience_s: float = _PATIENCE_S,
    ):
        self._send = send
        self._patience_s = patience_s
        self._sending: int | None = None  # number of the frame that is being sent
        self._limit_bytes = limit_bytes
        self._frames: deque[_Frame] = deque()
        self._held: dict[str, deque[_Frame]] = {}
        self._pending_bytes = 0
        self._more = asyncio.Event()
        self._closing = False
        self._event_prefix = new_id("event")
        self._n_events = 0
        self.overflowed = asyncio.Event()

    def emit(
        self,
        event_type: str,
        /,
        on_sent: OnSent | None = None,
        lane: str | None = None,
        audio_s: float = 0.0,
        numbered: bool = True,
        **fields: Any,
    ) -> None:
        if self._closing or self.overflowed.is_set():
            return
        # A random prefix per connection and a count are unique, and cheaper than a random id each.
        number = {"event_id": f"{self._event_prefix}_{self._n_events}"} if numbered else {}
        data = orjson.dumps({"type": event_type, **number, **fields})
        self._n_events += 1
        if self._pending_bytes + len(data) > self._limit_bytes:
            self._frames.clear()
            self._held.clear()
            self.overflowed.set()
            return
        self._pending_bytes += len(data)
        held = self._held.get(lane) if lane is not None else None
        queue = self._frames if held is None else held
        queue.append(_Frame(data, on_sent, lane, audio_s))
        self._more.set()

    def hold(self, lane: str) -> None:
        """Send no event of this lane until release()."""
        if lane not in self._held:
            self._frames, held = _split(self._frames, lambda frame: frame.lane == lane)
            self._held[lane] = held

    def release(self, lane: str) -> None:
        self._frames.extend(self._held.pop(lane, ()))
        self._more.set()

    def discard_audio(self, lane: str) -> float:
        """Drop the unsent audio of this lane. Returns its duration in seconds."""

        def unwanted(frame: _Frame) -> bool:
            return frame.lane == lane and frame.audio_s > 0

        self._frames, dropped = _split(self._frames, unwanted)
        if lane in self._held:
            self._held[lane], more = _split(self._held[lane], unwanted)
            dropped += more
        self._pending_bytes -= sum(len(frame.data) for frame in dropped)
        return sum(frame.audio_s for frame in dropped)

    def close(self) -> None:
        """Make drain() return after all events emitted so far are sent."""
        self._closing = True
        self._more.set()

    async def until_lost(self) -> str:
        """Wait until the client has stopped reading.

        Returns:
            "stalled" if one frame is not taken, "slow_reader" if the queue is full.
        """
        while not self.overflowed.is_set():
            before = self._sending
            try:
                async with asyncio.timeout(self._patience_s):
                    await self.overflowed.wait()
            except TimeoutError:
                if before is not None and before == self._sending:
                    return "stalled"
        return "slow_reader"

    async def drain(self) -> None:
        """Send until close(), or until the network fails. Raises exceptions of an on_sent."""
        n_sent = 0
        while True:
            while self._frames:
                frame = self._frames.popleft()
                self._sending = n_sent
                try:
                    await self._send(frame.data.decode())
                except Exception as error:  # of any type that a socket raises for a lost client
                    log.debug("send_failed error=%r", error)
                    return
                finally:
                    self._sending = None
                n_sent += 1
                self._pending_bytes -= len(frame.data)
                if frame.on_sent:
                    frame.on_sent()
            if self._closing:
                return
            self._more.clear()
            await self._more.wait()


def _split(
    frames: Iterable[_Frame], wanted: Callable[[_Frame], bool]
) -> tuple[deque[_Frame], deque[_Frame]]:
    """The frames that stay and those that are wanted, each in order."""
    stay: deque[_Frame] = deque()
    out: deque[_Frame] = deque()
    for frame in frames:
        (out if wanted(frame) else stay).append(frame)
    return stay, out
