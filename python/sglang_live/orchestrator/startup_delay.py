"""First sounds wait as long as recent replies show to be needed (policy/startup_delay.py).

In: audio of all replies as the vocoder delivers it. Out: the same, its beginning held back.
Owner: one StartupDelays per server.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from sglang_live.clock import Clock
from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.policy.startup_delay import StartupDelayConfig, lateness_s, startup_delay_s

_BYTES_PER_S = 2 * OUTPUT_RATE_HZ
# Later chunks are the schedulers' business: by then they know that somebody listens.
_BEGINNING_S = 3.0


@dataclass(slots=True, eq=False)
class _Chunks:
    """Audio of one reply that has come. arrivals: (time, duration) of its beginning. company: how
    many others sounded and were not complete when it began."""

    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    company: int = 0
    ended: bool = False

    def buffered_s(self, now_s: float) -> float:
        """How far it would be ahead of a listener who had begun with the first chunk."""
        made_s = sum(duration_s for _, duration_s in self.arrivals)
        return made_s - (now_s - self.arrivals[0][0])


class StartupDelays:
    def __init__(self, clock: Clock, config: StartupDelayConfig | None = None):
        self._clock, self._config = clock, config or StartupDelayConfig()
        # (when its first sound came, company then, lateness) of replies that ended.
        self._ended: deque[tuple[float, int, float]] = deque(maxlen=self._config.n_responses)
        self._n_sounding = 0

    def after(self, company: int) -> float:
        """What a reply waits, in seconds, whose first sound comes now while `company` others are
        being made."""
        oldest_s = self._clock.now_s() - self._config.max_age_s
        recent = [(others, late_s) for at_s, others, late_s in self._ended if at_s >= oldest_s]
        return startup_delay_s(recent, company, self._config)

    async def give(self, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """int16 PCM at 24 kHz in, the same out. Closes the source."""
        chunks = _Chunks()
        pump = asyncio.create_task(self._pump(source, chunks))
        try:
            pcm = await chunks.queue.get()
            if pcm is not None:
                await self._hold_back(chunks)
            while pcm is not None:
                yield pcm
                pcm = await chunks.queue.get()
            await pump  # raises what the source raised
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _hold_back(self, chunks: _Chunks) -> None:
        wait_s = self.after(chunks.company)
        if wait_s == 0:
            return
        waiting = asyncio.create_task(self._clock.sleep(wait_s))
        try:
            while not (waiting.done() or chunks.ended or self._is_safe(chunks)):
                chunks.news.clear()
                news = asyncio.create_task(chunks.news.wait())
                await asyncio.wait({waiting, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
        finally:
            waiting.cancel()

    def _is_safe(self, chunks: _Chunks) -> bool:
        return chunks.buffered_s(self._clock.now_s()) >= self._config.safe_s

    async def _pump(self, source: AsyncIterator[bytes], chunks: _Chunks) -> None:
        arrivals = chunks.arrivals
        try:
            async with aclosing(source):
                async for pcm in source:
                    now_s = self._clock.now_s()
                    if not arrivals:
                        chunks.company = self._n_sounding
                        self._n_sounding += 1
                    if not arrivals or now_s - arrivals[0][0] < _BEGINNING_S:
                        arrivals.append((now_s, len(pcm) / _BYTES_PER_S))
                    chunks.queue.put_nowait(pcm)
                    chunks.news.set()
            if arrivals:
                self._ended.append((arrivals[0][0], chunks.company, lateness_s(arrivals)))
        finally:
            self._n_sounding -= bool(arrivals)
            chunks.ended = True
            chunks.news.set()
            chunks.queue.put_nowait(None)
