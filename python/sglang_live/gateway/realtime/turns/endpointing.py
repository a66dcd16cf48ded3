"""Ends of turns by meaning: a pause is shown to a model, which may say that the turn is over.

In: the audio of a turn up to a pause. Out: a call of `end`, from the event loop.
Owner: one Endpointing per process. The model works in one thread of its own, one pause at a time: a
caller who goes on speaking is not waited for.
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

# Long enough to be no stop consonant; the model was trained on pauses like that.
_PAUSE_MS = 200
# How complete a turn must sound, and after which silence it is over all the same.
_EAGERNESS = {"low": (0.7, 8000), "medium": (0.5, 4000), "auto": (0.5, 4000), "high": (0.35, 2000)}


def settings_of(detection: TurnDetection) -> VadSettings:
    """Detection of speech for a session whose turns a model ends."""
    _, most_ms = _EAGERNESS[detection.eagerness]
    return replace(detection.vad, silence_duration_ms=most_ms, pause_ms=_PAUSE_MS)


@dataclass(eq=False)
class Endpointing:
    model: EndpointModel
    clock: Clock
    metrics: GatewayMetrics
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="endpoint")
    )
    _asking: set[asyncio.Task[None]] = field(default_factory=set)

    def ask(
        self,
        audio: np.ndarray,
        detection: TurnDetection,
        still_paused: Callable[[], bool],
        end: Callable[[], None],
    ) -> None:
        """
        Args:
            audio: [n] int16 of the turn so far.
            still_paused: asked again when it is this pause's turn, from the model's thread.
            end: called if the turn sounds complete.
        """
        task = asyncio.create_task(self._ask(audio, detection, still_paused, end))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _ask(
        self,
        audio: np.ndarray,
        detection: TurnDetection,
        still_paused: Callable[[], bool],
        end: Callable[[], None],
    ) -> None:
        asked_s = self.clock.now_s()

        def judge() -> float | None:
            return self.model.completeness(audio) if still_paused() else None

        try:
            score = await asyncio.get_running_loop().run_in_executor(self._thread, judge)
        except Exception:
            # The silence that ends every turn still does.
            log.exception("endpoint_model_failed")
            self.metrics.endpoint_verdicts.labels("failed").inc()
            return
        if score is None:
            self.metrics.endpoint_verdicts.labels("overtaken").inc()
            return
        self.metrics.endpoint_verdict_s.observe(self.clock.now_s() - asked_s)
        enough, _ = _EAGERNESS[detection.eagerness]
        complete = score >= enough
        self.metrics.endpoint_verdicts.labels("complete" if complete else "pause").inc()
        if complete:
            end()
