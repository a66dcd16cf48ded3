"""Passes the progress of many requests' consumers on to an engine, in few messages.

In: Progress of jobs. Out: one message to the engine every FLUSH_EVERY_S at most, none without news.
"""

import asyncio
from collections.abc import Callable

from sglang_live import messages
from sglang_live.aio import background
from sglang_live.clock import Clock
from sglang_live.engine_channel.messages import Progress

# The duration of a decode round on a fast device; more frequent messages have no effect.
FLUSH_EVERY_S = 0.02


class ProgressFeed:
    def __init__(self, send: Callable[[Progress], None], clock: Clock):
        self._send, self._clock = send, clock
        self._newest: dict[str, messages.Progress] = {}
        self._flushing: asyncio.Task[None] | None = None

    def put(self, rid: str, progress: messages.Progress) -> None:
        """The last value counts."""
        self._newest[rid] = progress
        if self._flushing is None:
            self._flushing = background(self._flush(), "progress feed")

    def forget(self, rid: str) -> None:
        """The request is over: drop its progress."""
        self._newest.pop(rid, None)

    async def _flush(self) -> None:
        try:
            while self._newest:
                newest, self._newest = self._newest, {}
                self._send(
                    Progress.of(
                        rids=list(newest),
                        consumed_s=[p.consumed_s for p in newest.values()],
                        advancing=[p.advancing for p in newest.values()],
                        interrupts=[p.interrupts for p in newest.values()],
                    )
                )
                await self._clock.sleep(FLUSH_EVERY_S)
        finally:
            self._flushing = None  # after an error the next progress begins anew
