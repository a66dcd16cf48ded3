"""Speech is scored beside the event loop, which goes on while the network computes.

In: windows of any caller's audio and the state before them. Out: probabilities, the state after.
Owner: one SpeechScorer per process, with a thread of its own. A caller waits for his own windows;
what was scored while the loop was busy comes with one wake-up of it.
"""

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from sglang_live.interaction.silero import SpeechModel, SpeechState

Scored = tuple[np.ndarray, SpeechState]


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    windows: np.ndarray
    state: SpeechState
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Scored]


@dataclass(frozen=True, slots=True, eq=False)
class _Answered:
    asked: _Asked
    scored: Scored | None
    error: Exception | None = None

    def give(self) -> None:
        if self.asked.answer.done():
            return  # the caller has left
        if self.error is not None:
            self.asked.answer.set_exception(self.error)
        else:
            self.asked.answer.set_result(self.scored)


@dataclass(eq=False)
class SpeechScorer:
    """For callers of one event loop."""

    model: SpeechModel
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="speech")
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asked: deque[_Asked] = field(default_factory=deque)
    _answered: deque[_Answered] = field(default_factory=deque)
    _works: bool = False  # the thread is at it, and looks for more before it stops
    _wakes: bool = False  # the loop has been told, and has not looked yet

    async def score(self, windows: np.ndarray, state: SpeechState) -> Scored:
        """As SpeechModel.probabilities. Callers are served in the order in which they ask."""
        loop = asyncio.get_running_loop()
        asked = _Asked(windows, state, loop, loop.create_future())
        with self._lock:
            self._asked.append(asked)
            begins, self._works = not self._works, True
        if begins:
            self._thread.submit(self._work)
        return await asked.answer

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._asked:
                    self._works = False
                    return
                asked = self._asked.popleft()
            if asked.answer.cancelled():
                continue
            self._tell(self._answer(asked))

    def _answer(self, asked: _Asked) -> _Answered:
        try:
            return _Answered(asked, self.model.probabilities(asked.windows, asked.state))
        except Exception as error:  # the caller's to deal with, not this thread's
            return _Answered(asked, None, error)

    def _tell(self, answered: _Answered) -> None:
        with self._lock:
            self._answered.append(answered)
            wakes, self._wakes = not self._wakes, True
        if wakes:
            answered.asked.loop.call_soon_threadsafe(self._give)

    def _give(self) -> None:
        with self._lock:
            answered, self._answered = self._answered, deque()
            self._wakes = False
        for each in answered:
            each.give()
