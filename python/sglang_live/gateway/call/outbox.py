"""Bounded queue of server events for one client, in order and numbered.

In: events, from any task, never blocking. Out: text frames, one at a time.
Owner: one Outbox per call. until_lost() returns when a client has stopped reading.
The events of a response form a lane. A held lane lets other events pass, and its unsent audio can
be discarded; frames that the network has taken cannot.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import orjson

from sglang_live.gateway.call.sent_log import Missed, OnSent, SentFrame, SentLog, not_kept
from sglang_live.ids import new_id
from sglang_live.interaction.playback import PlaybackClock

log = logging.getLogger(__name__)

Send = Callable[[str], Awaitable[None]]

# A client that has not taken a frame after one to two times this has gone. TCP itself detects only
# idle connections: a phone without signal would keep its session for hours.
_PATIENCE_S = 15.0
STALLED = "stalled"
_SLOW, _REPLACED = "slow_reader", "replaced"
_MAX_DIGITS = 16


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


class Outbox:
    """
    sent_log: of what was sent, for a client that comes back; None: nothing is kept.
    on_emit: called with type and lane of each event, behind it.
    """

    def __init__(
        self,
        send: Send,
        limit_bytes: int,
        patience_s: float = _PATIENCE_S,
    ):
        self._send = send
        self._patience_s = patience_s
        self._sending: int | None = None  # number of the frame that is being sent
        self._limit_bytes = limit_bytes
        self._frames: deque[SentFrame] = deque()
        self._held: dict[str, deque[SentFrame]] = {}
        self._pending_bytes = 0
        self._more = asyncio.Event()
        self._closing = False
        self._event_prefix = new_id("event")
        self._n_events = 0
        self.sent_log: SentLog | None = None
        self.on_emit: Callable[[str, str | None], None] | None = None
        self._n_sockets = 0
        self._lost = ""
        self._gone = asyncio.Event()

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
        if self._closing or self._lost == _SLOW:
            return
        # A random prefix per call and a count are unique, and cheaper than a random id each.
        number = {"event_id": f"{self._event_prefix}_{self._n_events}"} if numbered else {}
        data = orjson.dumps({"type": event_type, **number, **fields})
        if self._pending_bytes + len(data) > self._limit_bytes:
            self._frames.clear()
            self._held.clear()
            self._lose(_SLOW)
            return
        self._pending_bytes += len(data)
        held = self._held.get(lane) if lane is not None else None
        queue = self._frames if held is None else held
        queue.append(SentFrame(data, self._n_events, on_sent, lane, audio_s))
        self._n_events += 1
        self._more.set()
        if self.on_emit is not None:
            self.on_emit(event_type, lane)

    @property
    def n_events(self) -> int:
        """Number of the next one."""
        return self._n_events

    @property
    def event_prefix(self) -> str:
        """Of the ids of events. Random, so that no other outbox has it."""
        return self._event_prefix

    def next_number(self) -> tuple[int, str]:
        """For an event that is not emitted here: its number and id."""
        self._n_events += 1
        return self._n_events - 1, f"{self._event_prefix}_{self._n_events - 1}"

    def hold(self, lane: str) -> None:
        """Send no event of this lane until release()."""
        if lane not in self._held:
            # What the client had before it lost its socket comes again at once.
            held_back = lambda frame: frame.lane == lane and not frame.taken  # noqa: E731
            self._frames, held = _split(self._frames, held_back)
            self._held[lane] = held

    def release(self, lane: str) -> None:
        self._frames.extend(self._held.pop(lane, ()))
        self._more.set()

    def discard_audio(self, lane: str) -> float:
        """Drop the unsent audio of this lane. Returns its duration in seconds."""

        def unwanted(frame: SentFrame) -> bool:
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

    def missed(
        self,
        after: str | None,
        heard_s: float | None,
        clock_of: Callable[[str], PlaybackClock | None],
        now_s: float,
    ) -> Missed:
        """See SentLog. after: id of the last event that the client got."""
        if self.sent_log is None or self._lost == _SLOW:
            raise not_kept("resume", "events")
        last = None if after is None else number_of(after, self._event_prefix)
        return self.sent_log.missed(last, heard_s, clock_of, now_s)

    def stop(self) -> None:
        """Another socket takes over: drain() and until_lost() end."""
        self._n_sockets += 1
        self._lose(_REPLACED)
        self._more.set()

    def restart(self, send: Send, again: Iterable[SentFrame], welcome: str, **fields: Any) -> None:
        """Send over another socket: frames that its client lacks, an event, and what waits.

        welcome, fields: type and fields of the event, which is never sent again.
        """
        self._send = send
        if self._lost == _REPLACED:
            self._lost = ""
            self._gone.clear()
        waiting, self._frames = self._frames, deque(again)
        self._pending_bytes += sum(len(frame.data) for frame in self._frames)
        self.emit(welcome, **fields)
        if not self._lost:
            self._frames.append(replace(self._frames.pop(), repeats=False))
            self._frames += waiting

    async def until_lost(self) -> str:
        """Wait until the client has stopped reading, or has another socket.

        Returns:
            "stalled" if one frame is not taken, "slow_reader" if the queue is full, "replaced".
        """
        while not self._lost:
            before = self._sending
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._gone.wait()
            except TimeoutError:
                if before is not None and before == self._sending:
                    return STALLED
        return self._lost

    def _lose(self, why: str) -> None:
        self._lost = why
        self._gone.set()

    async def drain(self) -> None:
        """Send until close() or stop(), or until the network fails. Raises exceptions of an
        on_sent."""
        n_sent, n_sockets = 0, self._n_sockets
        while n_sockets == self._n_sockets:
            while self._frames:
                frame = self._frames.popleft()
                self._pending_bytes -= len(frame.data)
                if self.sent_log is not None:
                    self.sent_log.begin(frame)
                self._sending = n_sent
                try:
                    await self._send(frame.data.decode())
                except Exception as error:  # of any type that a socket raises for a lost client
                    log.debug("send_failed error=%r", error)
                    return
                finally:
                    self._sending = None
                n_sent += 1
                if n_sockets != self._n_sockets:
                    return
                if self.sent_log is not None:
                    self.sent_log.confirm()
                if frame.on_sent:
                    frame.on_sent()
            if self._closing:
                return
            self._more.clear()
            await self._more.wait()


def number_of(event_id: str, prefix: str) -> int:
    """Number of an event of the outbox with this prefix; -1: it has no such event."""
    own, _, number = event_id.rpartition("_")
    is_ours = own == prefix and number.isascii() and number.isdecimal()
    return int(number[:_MAX_DIGITS]) if is_ours else -1


def _split(
    frames: Iterable[SentFrame], wanted: Callable[[SentFrame], bool]
) -> tuple[deque[SentFrame], deque[SentFrame]]:
    """The frames that stay and those that are wanted, each in order."""
    stay: deque[SentFrame] = deque()
    out: deque[SentFrame] = deque()
    for frame in frames:
        (out if wanted(frame) else stay).append(frame)
    return stay, out
