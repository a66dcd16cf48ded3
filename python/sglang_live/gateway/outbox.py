"""Server events on their way to one client: ordered, numbered, bounded.

In: events, from any task, never blocking. Out: text frames, one at a time.
Owner: one Outbox per connection. A client that stops reading fills it; then nothing more is
kept and `overflowed` is set, for the connection to end.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson

from sglang_live.gateway.ids import new_id

OnSent = Callable[[], None]


class Emit(Protocol):
    """Send one server event; on_sent is called when the network has taken it."""

    def __call__(
        self, event_type: str, /, on_sent: OnSent | None = None, **fields: Any
    ) -> None: ...


class Outbox:
    def __init__(self, send: Callable[[str], Awaitable[None]], limit_bytes: int):
        self._send = send
        self._limit_bytes = limit_bytes
        self._frames: deque[tuple[bytes, OnSent | None]] = deque()
        self._pending_bytes = 0
        self._more = asyncio.Event()
        self._closing = False
        self._event_prefix = new_id("event")
        self._n_events = 0
        self.overflowed = asyncio.Event()

    def emit(self, event_type: str, /, on_sent: OnSent | None = None, **fields: Any) -> None:
        if self._closing or self.overflowed.is_set():
            return
        # One random prefix per connection and a count: unique, and cheaper than a random id each.
        event_id = f"{self._event_prefix}_{self._n_events}"
        frame = orjson.dumps({"type": event_type, "event_id": event_id, **fields})
        self._n_events += 1
        if self._pending_bytes + len(frame) > self._limit_bytes:
            self._frames.clear()
            self.overflowed.set()
            return
        self._pending_bytes += len(frame)
        self._frames.append((frame, on_sent))
        self._more.set()

    def close(self) -> None:
        """Let drain() end once everything emitted so far is sent."""
        self._closing = True
        self._more.set()

    async def drain(self) -> None:
        """Send until close(). Errors of the network end it."""
        while True:
            while self._frames:
                frame, on_sent = self._frames.popleft()
                await self._send(frame.decode())
                self._pending_bytes -= len(frame)
                if on_sent:
                    on_sent()
            if self._closing:
                return
            self._more.clear()
            await self._more.wait()
