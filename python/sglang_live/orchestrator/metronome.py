"""Common ticks for the turns of frame mode: what is due within a tick starts together.

In: frames as they become due. Out: all of a tick at once, so that the engine prefills them and
decodes behind them in the same steps (Metronome, section 4).
Owner: one Metronome per server.
"""

import asyncio
from collections import Counter
from itertools import count, pairwise

from sglang_live.aio import background
from sglang_live.clock import Clock

# Shorter than an engine step with many sessions, and a small part of the shortest frame.
TICK_S = 0.04
# The audio encoder's shortest input: no first frame is shorter.
_MIN_FIRST_FRAME_S = 0.08


class Metronome:
    def __init__(self, clock: Clock, tick_s: float = TICK_S):
        self._clock = clock
        self._tick_s = tick_s
        self._places: dict[str, tuple[float, int]] = {}  # by session: period, place in it
        self._n_at: Counter[tuple[float, int]] = Counter()  # sessions by place
        self._numbers = count()
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ticking: asyncio.Task[None] | None = None

    def join(self, session_id: str, period_s: float) -> float:
        """Give the session's frames a place in the period: one with the fewest sessions, as far
        from fuller places as possible.

        Returns:
            Seconds until its first frame, at least the audio encoder's shortest input.
        """
        self.leave(session_id)
        n_at = [self._n_at[period_s, n] for n in range(max(1, round(period_s / self._tick_s)))]
        place = _emptiest_place(n_at)
        self._places[session_id] = period_s, place
        self._n_at[period_s, place] += 1
        until_s = (place * self._tick_s - self._clock.now_s()) % period_s
        return until_s if until_s >= _MIN_FIRST_FRAME_S else until_s + period_s

    def leave(self, session_id: str) -> None:
        if (place := self._places.pop(session_id, None)) is not None:
            self._n_at[place] -= 1

    async def tick(self, due_s: float) -> None:
        """Wait for the next tick. Turns that are due first start first.

        Args:
            due_s: when the turn has to be done, on the clock.
        """
        start = asyncio.get_running_loop().create_future()
        self._due.append((due_s, next(self._numbers), start))
        if self._ticking is None:
            self._ticking = background(self._wait_for_tick(), "tick")
        await start

    async def _wait_for_tick(self) -> None:
        await self._clock.sleep(self._tick_s - self._clock.now_s() % self._tick_s)
        self._ticking = None
        self._start_due()

    def _start_due(self) -> None:
        due, self._due = sorted(self._due, key=lambda entry: entry[:2]), []
        for _, _, start in due:
            if not start.done():
                start.set_result(None)


def _emptiest_place(n_at: list[int]) -> int:
    """Of a ring's places with the fewest sessions, the one farthest from fuller places."""
    fewest = min(n_at)
    fuller = [place for place in range(len(n_at)) if n_at[place] > fewest]
    if not fuller:
        return 0
    ring = pairwise([*fuller, fuller[0] + len(n_at)])
    before, after = max(ring, key=lambda pair: pair[1] - pair[0])
    return (before + after) // 2 % len(n_at)
