"""End of a turn by meaning: a model judges in a pause whether the turn is complete.

In: a pause and the audio of its turn. Out: a call of `wait` with the verdict, in the event loop.
Owner: one Endpointing per process. The endpoint model runs in threads of its own, at most one per
core; the verdict on a pause in which the user has spoken again is dropped. Of the score
interaction/turn_end.py makes the silence that ends the turn.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_live.clock import Clock
from sglang_live.gateway.realtime.turn_detection import TurnDetection
from sglang_live.interaction.endpoint import EndpointModel
from sglang_live.interaction.turn_end import PAUSE_MS, cutoff_ms, judged, silence_ms
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


@dataclass(frozen=True, slots=True, eq=False)
class JudgedPause:
    """A pause to be judged.

    audio: [n] int16 of the turn, or of its last seconds, up to pause.at_ms.
    listens: whether the session still uses the detector.
    on_stopped: called if the turn ends at once.
    go_on: called if it does not, and the score says that the turn goes on.
    """

    pause: SpeechPaused
    audio: np.ndarray
    detector: SpeechDetector
    listens: Callable[[], bool]
    on_stopped: Callable[[SpeechStopped], None]
    go_on: Callable[[], None]

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

    def judge(self, pause: JudgedPause, eagerness: str) -> None:
        """Start to judge a pause."""
        task = asyncio.create_task(self._judge(pause, eagerness))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def judging(self) -> bool:
        """Whether a verdict is still to come."""
        return bool(self._tasks)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _judge(self, pause: JudgedPause, eagerness: str) -> None:
        began_s = self.clock.now_s()

        def completeness() -> float | None:
            return self.model.completeness(pause.audio) if pause.lasts() else None

        try:
            score = await asyncio.get_running_loop().run_in_executor(self._pool, completeness)
        except Exception:
            # Without a verdict the turn ends by silence.
            log.exception("endpoint_model_failed")
            self._count("failed")
            return
        if score is not None:
            self.metrics.endpoint_verdict_s.observe(self.clock.now_s() - began_s)
        if score is None or not pause.lasts():
            self._count("overtaken")
            return
        verdict = judged(score, cutoff_ms(eagerness))
        stopped = pause.detector.wait(pause.pause, verdict.wait_ms)
        self._count("pause" if stopped is None else "complete")
        if stopped is not None:
            pause.on_stopped(stopped)
        elif not verdict.likely:
            pause.go_on()

    def _count(self, verdict: str) -> None:
        self.metrics.endpoint_verdicts.labels(verdict).inc()
