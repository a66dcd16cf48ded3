"""End of a turn by meaning: a model judges in a pause whether the turn is complete.

In: a pause, the audio of its turn as the silence goes on, its words where a recogniser hears them.
Out: a call of `wait` with each verdict, in the event loop.
Owner: one Endpointing per process. The endpoint model runs in threads of its own, at most one per
core; the verdict on a pause in which the user has spoken again is dropped. Of the score and the
words interaction/turn_end.py makes the silence that ends the turn, anew with each of them.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_live.aio import background
from sglang_live.clock import Clock
from sglang_live.gateway.realtime.turn_detection import TurnDetection
from sglang_live.interaction.endpoint import EndpointModel
from sglang_live.interaction.turn_end import PAUSE_MS, SCORED_AT_MS, cutoff_ms, judged, silence_ms
from sglang_live.interaction.vad import SpeechDetector, SpeechPaused, SpeechStopped, VadSettings
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# A pause costs the network as much in a batch with others as alone, so that pauses are judged side
# by side. More threads would take the cores of the stages.
_MAX_THREADS = 4


def settings_of(detection: TurnDetection) -> VadSettings:
    """Settings of speech detection for a session whose pauses the model judges.

    Their silence ends a turn whose verdict does not come.
    """
    silent_ms = silence_ms(cutoff_ms(detection.eagerness))
    return replace(detection.vad, silence_duration_ms=silent_ms, pause_ms=PAUSE_MS)


@dataclass(slots=True, eq=False)
class JudgedPause:
    """A pause, and what is known of it so far.

    heard: the turn's audio up to a time in ms, or its last seconds, [n] int16.
    eagerness: of the session.
    listens: whether the session still uses the detector.
    on_stopped: called if the turn ends at once.
    go_on: called if it does not, and the evidence says that the turn goes on.
    score: the least of the endpoint model; None: there is none yet.
    words: their evidence (interaction/words/turn_words.py).
    n_scored: scores that were asked for.
    is_scoring: one of them is to come.
    """

    pause: SpeechPaused
    heard: Callable[[int], np.ndarray]
    eagerness: str
    detector: SpeechDetector
    listens: Callable[[], bool]
    on_stopped: Callable[[SpeechStopped], None]
    go_on: Callable[[], None]
    score: float | None = None
    words: float = 0.0
    n_scored: int = 0
    is_scoring: bool = False

    def lasts(self) -> bool:
        """Safe to call from a model's thread."""
        return self.listens() and self.detector.is_in(self.pause)


@dataclass(eq=False)
class Endpointing:
    model: EndpointModel
    clock: Clock
    metrics: GatewayMetrics
    threads: int = field(default_factory=lambda: min(os.cpu_count() or 1, _MAX_THREADS))
    _pool: ThreadPoolExecutor = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="endpoint")

    def grow(self, pause: JudgedPause, silence_ms: int) -> None:
        """The silence has lasted for silence_ms: score the pause if it is time to."""
        n_due = sum(silence_ms >= at_ms for at_ms in SCORED_AT_MS)
        if n_due <= pause.n_scored or pause.is_scoring:
            return
        # A busy model is not asked for scores that are overdue.
        pause.n_scored, pause.is_scoring = n_due, True
        audio = pause.heard(pause.pause.speech_end_ms + silence_ms)
        task = background(self._score(pause, audio), "endpoint")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take_words(self, pause: JudgedPause, evidence: float) -> None:
        """The words of the turn up to the pause have this evidence."""
        pause.words = evidence
        if pause.score is not None and evidence and pause.lasts():
            self._decide(pause, pause.score)

    @property
    def judging(self) -> bool:
        """Whether a verdict is still to come."""
        return bool(self._tasks)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _score(self, pause: JudgedPause, audio: np.ndarray) -> None:
        began_s = self.clock.now_s()

        def completeness() -> float | None:
            return self.model.completeness(audio) if pause.lasts() else None

        try:
            score = await asyncio.get_running_loop().run_in_executor(self._pool, completeness)
        except Exception:
            # Without a verdict the turn ends by silence.
            log.exception("endpoint_model_failed")
            self._count("failed")
            return
        finally:
            pause.is_scoring = False
        if score is not None:
            self.metrics.endpoint_verdict_s.observe(self.clock.now_s() - began_s)
        if score is None or not pause.lasts():
            self._count("overtaken")
            return
        pause.score = score if pause.score is None else min(pause.score, score)
        self._decide(pause, pause.score)

    def _decide(self, pause: JudgedPause, score: float) -> None:
        verdict = judged(score, cutoff_ms(pause.eagerness), pause.words)
        stopped = pause.detector.wait(pause.pause, verdict.wait_ms)
        self._count("pause" if stopped is None else "complete")
        if stopped is not None:
            pause.on_stopped(stopped)
        elif not verdict.likely:
            pause.go_on()

    def _count(self, verdict: str) -> None:
        self.metrics.endpoint_verdicts.labels(verdict).inc()
