"""Barge-in: when a caller's voice stops an answer, and when it was only a cough.

In: the detector's speech events. Out: an answer that is held, goes on, or is interrupted.
Owner: one BargeIn per caller.

The first sign of a voice holds the answer's audio: nothing more leaves. Only a voice that lasts
is a barge-in. A listener has some audio in the buffer, so a cough is not even noticed.
"""

import asyncio
from typing import Protocol

from sglang_live.clock import Clock
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.telemetry.metrics import GatewayMetrics

# Suspicion is settled in audio received. A client that stops sending must not silence us.
_MAX_HOLD_S = 1.0


class Interruptible(Protocol):
    """The answers a caller may be hearing."""

    @property
    def audible(self) -> bool: ...

    def hold(self) -> None:
        """Keep audio back until release()."""
        ...

    def release(self) -> None: ...

    def interrupt(self) -> None:
        """End them; what was heard of them stays."""
        ...


class BargeIn:
    def __init__(
        self, answers: Interruptible, monitor: SessionMonitor, clock: Clock, metrics: GatewayMetrics
    ):
        self._answers = answers
        self._monitor = monitor
        self._clock = clock
        self._metrics = metrics
        self._paused_since_s: float | None = None
        self._limit: asyncio.Task[None] | None = None

    def suspect(self, onset_s: float, confirm_ms: int) -> None:
        """A voice, perhaps. onset_s: when it began, on the clock."""
        self._monitor.speech_suspected(onset_s)
        if self._paused_since_s is None:
            self._paused_since_s = self._clock.now_s()
            self._answers.hold()
            self._monitor.held()
            self._limit = asyncio.create_task(self._let_go(confirm_ms / 1000 + _MAX_HOLD_S))

    def dismiss(self) -> None:
        """It was none."""
        self._metrics.false_alarms.inc()
        self._monitor.speech_dismissed()
        self.withdraw()

    def withdraw(self) -> None:
        """Nobody will say any more whether it was one: the answer goes on."""
        if self._paused_since_s is not None:
            self._end_hold()
            self._monitor.released()

    def interrupt(self, onset_s: float) -> None:
        """The caller speaks: end the answer, heard or not."""
        now_s = self._clock.now_s()
        if self._paused_since_s is not None or self._answers.audible:
            stopped_s = now_s if self._paused_since_s is None else self._paused_since_s
            self._metrics.barge_ins.inc()
            self._metrics.stop_latency_s.observe(max(0.0, stopped_s - onset_s))
            self._metrics.barge_in_latency_s.observe(max(0.0, now_s - onset_s))
        # First, because audio let go would leave; what remains held is discarded with the answer.
        self._answers.interrupt()
        if self._paused_since_s is not None:
            self._end_hold()

    def _end_hold(self) -> None:
        assert self._paused_since_s is not None
        self._metrics.audio_on_hold_s.inc(self._clock.now_s() - self._paused_since_s)
        self._paused_since_s = None
        if self._limit:
            self._limit.cancel()
            self._limit = None
        self._answers.release()

    async def _let_go(self, after_s: float) -> None:
        await self._clock.sleep(after_s)
        self._limit = None  # withdraw() must not cancel its own task
        self.withdraw()
