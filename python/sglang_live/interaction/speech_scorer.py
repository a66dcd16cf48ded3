"""Speech probabilities for all callers: windows that are due together are scored together.

In: the windows of one caller. Out: their probabilities, once every one of them was in a batch.
Owner: one SpeechScorer per process. The network works in a thread of its own; whatever comes
meanwhile is in the next batch, so a batch is as large as the load makes it, and nobody waits for
it to fill.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np

from sglang_live.interaction.silero import SpeechModel

log = logging.getLogger(__name__)

_STOP_S = 5.0


@dataclass(slots=True, eq=False)
class _Ask:
    """scores: of its first windows. state: after them."""

    windows: np.ndarray
    state: np.ndarray
    answer: asyncio.Future[tuple[np.ndarray, np.ndarray]]
    scores: list[float] = field(default_factory=list)
    error: Exception | None = None

    @property
    def over(self) -> bool:
        return self.error is not None or len(self.scores) == len(self.windows)


class SpeechScorer:
    def __init__(self, model: SpeechModel):
        self._model = model
        self._asks: SimpleQueue[_Ask | None] = SimpleQueue()
        self._thread: Thread | None = None

    async def score(self, windows: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Score consecutive windows of one caller.

        Args:
            windows: [n, CONTEXT_SAMPLES + WINDOW_SAMPLES] float32, as SpeechModel takes them.
            state: [2, 128] float32, after the window before.
        Returns:
            [n] float32 probabilities of speech, and the state after the last window.
        """
        if self._thread is None:
            self._thread = Thread(target=self._work, name="speech scorer", daemon=True)
            self._thread.start()
        ask = _Ask(windows, state, asyncio.get_running_loop().create_future())
        self._asks.put(ask)
        return await ask.answer

    def close(self) -> None:
        """What is asked for now is not answered any more."""
        if self._thread is not None:
            self._asks.put(None)
            self._thread.join(_STOP_S)
            self._thread = None

    # --- in the thread ---

    def _work(self) -> None:
        batch: list[_Ask] = []
        while self._gather(batch):
            self._step(batch)
            if over := [ask for ask in batch if ask.over]:
                batch = [ask for ask in batch if not ask.over]
                with suppress(RuntimeError):  # the loop is closed, nobody listens
                    over[0].answer.get_loop().call_soon_threadsafe(_deliver, over)

    def _gather(self, batch: list[_Ask]) -> bool:
        """Add all that was asked meanwhile; wait if there is nothing to do. False: the end."""
        with suppress(Empty):
            while True:
                ask = self._asks.get(block=not batch)
                if ask is None:
                    return False
                batch.append(ask)
        return True

    def _step(self, batch: list[_Ask]) -> None:
        windows = np.stack([ask.windows[len(ask.scores)] for ask in batch])
        states = np.stack([ask.state for ask in batch], axis=1)
        try:
            scores, states = self._model.score(windows, states)
        except Exception as error:
            log.exception("speech_model_failed n=%d", len(batch))
            for ask in batch:
                ask.error = error
            return
        for i, ask in enumerate(batch):
            ask.scores.append(float(scores[i]))
            ask.state = states[:, i]


def _deliver(asks: list[_Ask]) -> None:
    for ask in asks:
        if ask.answer.done():
            continue  # its caller has gone
        if ask.error is not None:
            ask.answer.set_exception(ask.error)
        else:
            ask.answer.set_result((np.array(ask.scores, np.float32), ask.state))
