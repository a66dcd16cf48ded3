"""Barge-in: whether the user's voice interrupts a response, or was only a cough.

In: the detector's speech events. Out: audio that is held and released, responses interrupted.
Owner: one BargeIn per session.

At the first sign of a voice audio is held. Only a voice that lasts is a barge-in. The client has
some audio buffered, so that a cough causes no audible gap.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from sglang_live.aio import background
from sglang_live.clock import Clock
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.telemetry.metrics import GatewayMetrics


class HeldAudio(Protocol):
    """Audio of the responses that the user may be hearing."""

    @property
    def audible(self) -> bool: ...

    def hold(self) -> None:
        """Keep audio in the gateway until release()."""
        ...

    def release(self) -> None: ...


class BargeIn:
    """
    Args:
        interrupt: ends all responses; what was heard of them stays.
        on_limit: called when the audio was held for as long as it may be.
    """

    def __init__(
        self,
        audio: HeldAudio,
        interrupt: Callable[[], None],
        monitor: SessionMonitor,
        clock: Clock,
        metrics: GatewayMetrics,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self._audio = audio
        self._interrupt = interrupt
        self._monitor = monitor
        self._clock = clock
        self._metrics = metrics
        self._on_limit = on_limit
        self._held_since_s: float | None = None
        self._limit: asyncio.Task[None] | None = None

    def suspect(self, onset_s: float, longest_s: float) -> None:
        """There may be a voice since onset_s.

        Args:
            longest_s: of the hold. A suspicion ends by audio received, which a client may stop
                sending.
        """
        self._monitor.speech_suspected(onset_s)
        if self._held_since_s is None:
            self._held_since_s = self._clock.now_s()
            self._audio.hold()
            self._monitor.held()
            self._limit = background(self._withdraw_after(longest_s), "longest suspicion")

    def dismiss(self, decision: str, reason: str) -> None:
        """The suspected voice ended and was no turn."""
        self._metrics.false_alarms.inc()
        self._monitor.speech_dismissed(decision, reason)
        self.withdraw()

    def withdraw(self) -> None:
        """End a suspicion that will neither be confirmed nor dismissed."""
        if self._held_since_s is not None:
            self._end_hold()
            self._monitor.released()

    def interrupt(self, onset_s: float) -> None:
        """The user has spoken since onset_s: end all responses, also those without audio yet."""
        now_s = self._clock.now_s()
        if self._held_since_s is not None or self._audio.audible:
            stopped_s = now_s if self._held_since_s is None else self._held_since_s
            self._metrics.barge_ins.inc()
            self._metrics.stop_latency_s.observe(max(0.0, stopped_s - onset_s))
            self._metrics.barge_in_latency_s.observe(max(0.0, now_s - onset_s))
        # Before the release, which would send the audio: an interruption discards what is held.
        self._interrupt()
        if self._held_since_s is not None:
            self._end_hold()

    def _end_hold(self) -> None:
        assert self._held_since_s is not None
        self._metrics.audio_on_hold_s.inc(self._clock.now_s() - self._held_since_s)
        self._held_since_s = None
        if self._limit:
            self._limit.cancel()
            self._limit = None
        self._audio.release()

    async def _withdraw_after(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        self._limit = None  # withdraw() must not cancel its own task
        self.withdraw()
        self._on_limit()
