"""End of a turn by meaning: a model judges in a pause whether the turn is complete.

In: the audio of a turn up to a pause. Out: a call of `end_turn` or `go_on`, in the event
loop.
Owner: one Endpointing per process. The model runs in a thread of its own, for one pause at a time;
the verdict on a pause in which the user has spoken again is dropped.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_live.clock import Clock
from sglang_live.gateway.realtime.turn_detection import TurnDetection
from sglang_live.interaction.endpoint import EndpointModel
from sglang_live.interaction.vad import VadSettings
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# Longer than the closure of a stop consonant; the model was trained on pauses of this length.
PAUSE_MS = 200
# By eagerness: the least score of a complete turn, and the silence that ends a turn in any case.
_EAGERNESS = {"low": (0.7, 8000), "medium": (0.5, 4000), "auto": (0.5, 4000), "high": (0.35, 2000)}


def settings_of(detection: TurnDetection) -> VadSettings:
    """Settings of speech detection for a session whose turns the model ends."""
    _, max_silence_ms = _EAGERNESS[detection.eagerness]
    return replace(detection.vad, silence_duration_ms=max_silence_ms, pause_ms=PAUSE_MS)


@dataclass(eq=False)
class Endpointing:
    model: EndpointModel
    clock: Clock
    metrics: GatewayMetrics
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="endpoint")
    )
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def judge(
        self,
        audio: np.ndarray,
        detection: TurnDetection,
        still_paused: Callable[[], bool],
        end_turn: Callable[[], None],
        go_on: Callable[[], None],
    ) -> None:
        """Start to judge a pause.

        Args:
            audio: [n] int16 of the turn so far.
            still_paused: called in the model's thread right before the model runs, and after it.
            end_turn: called if the turn sounds complete.
            go_on: called if it does not and the pause goes on.
        """
        task = asyncio.create_task(self._judge(audio, detection, still_paused, end_turn, go_on))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _judge(
        self,
        audio: np.ndarray,
        detection: TurnDetection,
        still_paused: Callable[[], bool],
        end_turn: Callable[[], None],
        go_on: Callable[[], None],
    ) -> None:
        began_s = self.clock.now_s()

        def completeness() -> float | None:
            return self.model.completeness(audio) if still_paused() else None

        try:
            score = await asyncio.get_running_loop().run_in_executor(self._thread, completeness)
        except Exception:
            # Without a verdict the turn ends by silence.
            log.exception("endpoint_model_failed")
            self.metrics.endpoint_verdicts.labels("failed").inc()
            return
        if score is None:
            self.metrics.endpoint_verdicts.labels("overtaken").inc()
            return
        self.metrics.endpoint_verdict_s.observe(self.clock.now_s() - began_s)
        min_score, _ = _EAGERNESS[detection.eagerness]
        complete = score >= min_score
        self.metrics.endpoint_verdicts.labels("complete" if complete else "pause").inc()
        if complete:
            end_turn()
        elif still_paused():
            go_on()
