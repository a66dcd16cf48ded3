"""Speech is scored in a thread beside the event loop, in batches over all sessions.

In: windows of a user's audio and the state before them. Out: probabilities, the state after.
Owner: one SpeechScorer per process. Results that are ready while the loop is busy are delivered
by one wake-up of the loop.
"""

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from sglang_live.interaction.silero import SpeechModel, SpeechScores, SpeechState, SpeechWindows

# In one call of the model. Beyond this a window costs hardly less, and all wait for the last one.
_MAX_WINDOWS_PER_CALL = 64
# From one batch's begin to the next one's: so the windows of many users come together. Each call
# takes the interpreter's lock from the event loop several times. A user alone does not wait.
_LEAST_INTERVAL_S = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    windows: SpeechWindows
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[SpeechScores]


@dataclass(frozen=True, slots=True, eq=False)
class _Result:
    job: _Job
    scores: SpeechScores | Exception

    def deliver(self) -> None:
        if self.job.future.done():
            return  # cancelled
        if isinstance(self.scores, Exception):
            self.job.future.set_exception(self.scores)
        else:
            self.job.future.set_result(self.scores)


class SpeechScorer:
    """For the sessions of one event loop."""

    def __init__(self, model: SpeechModel) -> None:
        self.model = model
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None: close
        self._results: deque[_Result] = deque()
        self._lock = threading.Lock()
        self._wakes = False  # the loop has been woken and has not delivered yet
        self._thread = threading.Thread(target=self._work, name="speech", daemon=True)

    async def score(self, windows: np.ndarray, state: SpeechState) -> SpeechScores:
        """Score as SpeechModel.score does, in the order of the calls.

        Raises:
            RuntimeError: the scorer was closed.
        """
        if not self._thread.is_alive():
            self._thread.start()
        loop = asyncio.get_running_loop()
        job = _Job((windows, state), loop, loop.create_future())
        self._jobs.put(job)
        return await job.future

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        next_s = 0.0
        while (job := self._jobs.get()) is not None:
            if (early_s := next_s - time.monotonic()) > 0:
                time.sleep(early_s)
            next_s = time.monotonic() + _LEAST_INTERVAL_S
            if batch := self._batch_from(job):
                self._add_results(self._score(batch))

    def _batch_from(self, job: _Job | None) -> list[_Job]:
        """The job and those queued behind it, up to the bound of windows."""
        batch: list[_Job] = []
        n_windows = 0
        while job is not None:
            if not job.future.cancelled():
                batch.append(job)
                n_windows += len(job.windows[0])
            if n_windows >= _MAX_WINDOWS_PER_CALL:
                return batch
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return batch
        self._jobs.put(None)  # ends the thread after this batch
        return batch

    def _score(self, batch: list[_Job]) -> list[_Result]:
        try:
            scores = self.model.score([job.windows for job in batch])
        except Exception as error:  # raised by score() of the job that caused it
            if len(batch) == 1:
                return [_Result(batch[0], error)]
            return [result for job in batch for result in self._score([job])]
        return [_Result(job, each) for job, each in zip(batch, scores, strict=True)]

    def _add_results(self, results: list[_Result]) -> None:
        with self._lock:
            self._results.extend(results)
            wakes, self._wakes = not self._wakes, True
        if wakes:
            results[0].job.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            results, self._results = self._results, deque()
            self._wakes = False
        for result in results:
            result.deliver()
