"""How far the listeners of many replies are, on its way into an engine as few messages.

In: Progress of jobs. Out: feed messages, at most one every FLUSH_EVERY_S, and none without news.
"""

import asyncio
from collections.abc import Callable

from sglang_live import messages
from sglang_live.clock import Clock
from sglang_live.engine_channel.messages import Progress

# A decode round takes as long on a fast device; news within one cannot be told apart.
FLUSH_EVERY_S = 0.02


class ProgressFeed:
    def __init__(self, send: Callable[[Progress], None], clock: Clock):
        self._send, self._clock = send, clock
        self._newest: dict[str, messages.Progress] = {}
        self._flushing: asyncio.Task | None = None

    def put(self, rid: str, progress: messages.Progress) -> None:
        """Last write wins: playback only matters as it is now."""
        self._newest[rid] = progress
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush(), name="flush progress")

    def forget(self, rid: str) -> None:
        """The reply is over; the engine need not hear of it again."""
        self._newest.pop(rid, None)

    async def _flush(self) -> None:
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
        self._flushing = None
