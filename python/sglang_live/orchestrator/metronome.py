"""The beat that frames are handed to the stages at: what is due within a tick goes as one.

In: frames as they become due. Out: all of a tick at once, so that the engine takes them in and
decodes after them in the same steps (Metronome, section 4).
Owner: one Metronome per server.
"""

import asyncio
from collections import Counter
from itertools import count, pairwise

from sglang_live.clock import Clock

# Shorter than a step with many sessions, and a small part of the shortest frame.
TICK_S = 0.04
# The first frame is never shorter than the audio encoder's shortest.
_LEAST_S = 0.08


class Metronome:
    def __init__(self, clock: Clock, tick_s: float = TICK_S):
        self._clock, self._tick_s = clock, tick_s
        self._places: dict[str, tuple[float, int]] = {}  # by session: period, place in it
        self._crowd: Counter[tuple[float, int]] = Counter()
        self._numbers = count()
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ticking: asyncio.Task[None] | None = None

    def join(self, session_id: str, period_s: float) -> float:
        """A session's beats begin, where few others have theirs and as far from them as may be.

        Returns:
            Seconds until the first, up to period_s and a little.
        """
        self.leave(session_id)
        crowd = [self._crowd[period_s, n] for n in range(max(1, round(period_s / self._tick_s)))]
        place = _loneliest(crowd)
        self._places[session_id] = period_s, place
        self._crowd[period_s, place] += 1
        until_s = (place * self._tick_s - self._clock.now_s()) % period_s
        return until_s if until_s >= _LEAST_S else until_s + period_s

    def leave(self, session_id: str) -> None:
        if (place := self._places.pop(session_id, None)) is not None:
            self._crowd[place] -= 1

    async def beat(self, due_s: float) -> None:
        """Wait for the next tick. Those who are due first go first.

        due_s: when the answer is due, on the clock.
        """
        turn = asyncio.get_running_loop().create_future()
        self._due.append((due_s, next(self._numbers), turn))
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick(), name="tick")
        await turn

    async def _tick(self) -> None:
        await self._clock.sleep(self._tick_s - self._clock.now_s() % self._tick_s)
        self._ticking = None
        self._let_go()

    def _let_go(self) -> None:
        due, self._due = sorted(self._due, key=lambda entry: entry[:2]), []
        for _, _, turn in due:
            if not turn.done():
                turn.set_result(None)


def _loneliest(crowd: list[int]) -> int:
    """Of the places of a ring with the smallest crowd, the one farthest from greater crowds."""
    least = min(crowd)
    fuller = [place for place in range(len(crowd)) if crowd[place] > least]
    if not fuller:
        return 0
    ring = pairwise([*fuller, fuller[0] + len(crowd)])
    before, after = max(ring, key=lambda pair: pair[1] - pair[0])
    return (before + after) // 2 % len(crowd)
