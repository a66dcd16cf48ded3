"""Withholds the first audio of a response for the startup delay (policy/startup_delay.py).

In: audio of all responses as the vocoder delivers it. Out: the same audio, its beginning later.
Owner: one StartupDelays per server.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from sglang_live.aio import merge
from sglang_live.clock import Clock
from sglang_live.core import OUTPUT_RATE_HZ, AudioDelta
from sglang_live.policy.startup_delay import (
    Beginning,
    StartupDelayConfig,
    lateness_s,
    startup_delay_s,
)

_BYTES_PER_S = 2 * OUTPUT_RATE_HZ
# Later chunks depend on the schedulers, which have playback reports by then.
_BEGINNING_S = 3.0
# Responses that ended and may count; more than the policy takes into account.
_N_ENDED = 64
# Chunks that are read ahead of the client: of 80 ms each, more than the audio that ends a delay.
_AHEAD = 8


@dataclass(slots=True, eq=False)
class _Chunks:
    """Audio of one response that has come.

    n_unread: chunks that were not passed on.
    news: set when a chunk has come, or the end.
    arrivals: time and duration of each chunk of its beginning, in seconds.
    n_others: responses with audio that were not complete when this one's audio began.
    """

    n_unread: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    n_others: int = 0
    ended: bool = False

    def beginning(self) -> Beginning:
        late_s = lateness_s(self.arrivals)
        return Beginning(self.arrivals[0][0], self.n_others, late_s, self.ended)

    def buffered_s(self, now_s: float) -> float:
        """Seconds of audio in a client's buffer, had its playback begun with the first chunk."""
        made_s = sum(duration_s for _, duration_s in self.arrivals)
        return made_s - (now_s - self.arrivals[0][0])


class StartupDelays:
    def __init__(self, clock: Clock):
        self._clock = clock
        self._config = StartupDelayConfig()
        self._ended: deque[Beginning] = deque(maxlen=_N_ENDED)
        # Responses with audio that are not complete; in order, so that a simulation repeats.
        self._open: dict[_Chunks, None] = {}

    def delay_s(self, n_others: int) -> float:
        """The startup delay of a response whose audio begins now, beside n_others."""
        beginnings = [*self._ended, *(chunks.beginning() for chunks in self._open)]
        return startup_delay_s(beginnings, n_others, self._clock.now_s(), self._config)

    async def delayed(
        self, source: AsyncGenerator[AudioDelta, None]
    ) -> AsyncGenerator[AudioDelta, None]:
        """Yield the audio of the source, its beginning later. Closes the source."""
        chunks, begun = _Chunks(), False
        async with aclosing(merge(self._noted(source, chunks), ahead=_AHEAD)) as read:
            async for chunk in read:
                if not begun:
                    begun = True
                    await self._wait(chunks)
                chunks.n_unread -= 1
                yield chunk

    async def _wait(self, chunks: _Chunks) -> None:
        wait_s = self.delay_s(chunks.n_others)
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

    async def _noted(
        self, source: AsyncGenerator[AudioDelta, None], chunks: _Chunks
    ) -> AsyncGenerator[AudioDelta, None]:
        """The audio of the source, whose arrivals are noted."""
        arrivals, waits = chunks.arrivals, False
        try:
            async with aclosing(source):
                async for chunk in source:
                    now_s = self._clock.now_s()
                    if not arrivals:
                        chunks.n_others = len(self._open)
                    if not arrivals or (now_s - arrivals[0][0] < _BEGINNING_S and not waits):
                        arrivals.append((now_s, len(chunk.pcm) / _BYTES_PER_S))
                        self._open[chunks] = None
                    # What comes after a slow client was waited for is not late by itself.
                    waits = waits or chunks.n_unread >= _AHEAD
                    chunks.n_unread += 1
                    chunks.news.set()
                    yield chunk
            if arrivals:
                chunks.ended = True
                self._ended.append(chunks.beginning())
        finally:
            self._open.pop(chunks, None)
            chunks.ended = True
            chunks.news.set()
