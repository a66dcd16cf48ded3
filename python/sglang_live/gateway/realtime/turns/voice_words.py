"""The words of a voice over a response that was too short to interrupt it.

In: the audio of the voice. Out: a call of `on_turn` if its words take the turn.
Owner: one VoiceWords per connection. One voice at a time; one that comes meanwhile has no words.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_live.aio import background
from sglang_live.clock import Clock
from sglang_live.core import AudioPart
from sglang_live.errors import LiveError
from sglang_live.gateway.transcribe import transcribe
from sglang_live.interaction.words.interrupting_words import takes_turn
from sglang_live.orchestrator.session import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# Words that come later would stop a response at a point that has nothing to do with them.
_LATE_S = 1.0
_WIND_DOWN_S = 1.0


@dataclass(eq=False)
class VoiceWords:
    session: VoiceSession
    clock: Clock
    metrics: GatewayMetrics
    _task: asyncio.Task[None] | None = None

    @property
    def judging(self) -> bool:
        return self._task is not None and not self._task.done()

    def judge(
        self, pcm: npt.NDArray[np.int16], language: str | None, on_turn: Callable[[], None]
    ) -> None:
        """
        Args:
            pcm: [n] int16, 16 kHz, of the whole voice.
            language: of the speech; None: any.
            on_turn: called in the event loop.
        """
        if self.judging:
            self.metrics.voice_words.labels("busy").inc()
            return
        self._task = background(self._judge(pcm, language, on_turn), "voice words")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_WIND_DOWN_S)

    async def _judge(
        self, pcm: npt.NDArray[np.int16], language: str | None, on_turn: Callable[[], None]
    ) -> None:
        began_s = self.clock.now_s()
        try:
            outcome = await self._outcome(pcm, language)
        except LiveError as error:
            # Without words the voice stays what its sound made it.
            log.warning("voice_words_failed code=%s", error.code)
            outcome = "failed"
        except Exception:
            log.exception("voice_words_crashed")
            outcome = "failed"
        if outcome == "turn" and self.clock.now_s() - began_s > _LATE_S:
            outcome = "late"
        self.metrics.voice_words.labels(outcome).inc()
        if outcome == "turn":
            on_turn()

    async def _outcome(self, pcm: npt.NDArray[np.int16], language: str | None) -> str:
        clips = (AudioPart(pcm),)
        deltas = transcribe(self.session, clips, None, language=language)
        text = "".join([delta async for delta in deltas if isinstance(delta, str)])
        if not text.strip():
            return "none"
        return "turn" if takes_turn(text, language) else "other"
