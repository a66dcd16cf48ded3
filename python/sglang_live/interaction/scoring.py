"""Speech is scored beside the event loop, which goes on while the network computes.

In: windows of any caller's audio and the state before them. Out: probabilities, the state after.
Owner: one SpeechScorer per process, with a thread of its own. A caller waits for his own windows;
what was scored while the loop was busy comes with one wake-up of it.
"""

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from sglang_live.interaction.silero import Asked, Scored, SpeechModel, SpeechState

# Of one call of the model: more windows are hardly cheaper each, and all wait for the last one.
_WINDOWS_TOGETHER = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Ask:
    what: Asked
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Scored]


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    to: _Ask
    scored: Scored | None
    error: Exception | None = None

    def give(self) -> None:
        if self.to.answer.done():
            return  # the caller has left
        if self.error is not None:
            self.to.answer.set_exception(self.error)
        else:
            self.to.answer.set_result(self.scored)


class SpeechScorer:
    """For callers of one event loop."""

    def __init__(self, model: SpeechModel):
        self.model = model
        self._asked: SimpleQueue[_Ask | None] = SimpleQueue()  # None: close
        self._answered: deque[_Answer] = deque()
        self._lock = threading.Lock()
        self._wakes = False  # the loop has been told, and has not looked yet
        self._thread = threading.Thread(target=self._work, name="speech", daemon=True)

    async def score(self, windows: np.ndarray, state: SpeechState) -> Scored:
        """As SpeechModel.score, of one. Callers are served in the order in which they ask.

        Raises:
            RuntimeError: it was closed.
        """
        if not self._thread.is_alive():
            self._thread.start()
        loop = asyncio.get_running_loop()
        ask = _Ask((windows, state), loop, loop.create_future())
        self._asked.put(ask)
        return await ask.answer

    def close(self) -> None:
        self._asked.put(None)

    def _work(self) -> None:
        while (ask := self._asked.get()) is not None:
            if asks := self._with_others(ask):
                self._tell(self._answers(asks))

    def _with_others(self, ask: _Ask | None) -> list[_Ask]:
        """Those that are scored together: who comes first, and who fits in with them."""
        asks, n_windows = [], 0
        while ask is not None:
            if not ask.answer.cancelled():
                asks.append(ask)
                n_windows += len(ask.what[0])
            if n_windows >= _WINDOWS_TOGETHER:
                return asks
            try:
                ask = self._asked.get_nowait()
            except Empty:
                return asks
        self._asked.put(None)  # for the thread, which closes after these
        return asks

    def _answers(self, asks: list[_Ask]) -> list[_Answer]:
        try:
            scored = self.model.score([ask.what for ask in asks])
        except Exception as error:  # the caller's to deal with, not this thread's
            if len(asks) == 1:
                return [_Answer(asks[0], None, error)]
            return [answer for ask in asks for answer in self._answers([ask])]
        return [_Answer(ask, one) for ask, one in zip(asks, scored, strict=True)]

    def _tell(self, answers: list[_Answer]) -> None:
        with self._lock:
            self._answered.extend(answers)
            wakes, self._wakes = not self._wakes, True
        if wakes:
            answers[0].to.loop.call_soon_threadsafe(self._give)

    def _give(self) -> None:
        with self._lock:
            answered, self._answered = self._answered, deque()
            self._wakes = False
        for each in answered:
            each.give()
