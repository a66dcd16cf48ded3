"""The words of a turn up to a pause, as evidence of whether the turn is over.

In: the utterance up to the pause, whose clips the recogniser hears anyway: turn prefill asks it for
the same ones, and it hears each clip once. Out: a call of `on_evidence`.
Owner: one PauseWords per connection. Only the latest pause has words.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sglang_live.aio import background
from sglang_live.core import AudioPart
from sglang_live.errors import LiveError
from sglang_live.gateway.realtime.responses.speculation import Utterance
from sglang_live.gateway.transcribe import transcribe
from sglang_live.interaction.words.turn_words import evidence
from sglang_live.orchestrator.session import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_WIND_DOWN_S = 1.0


@dataclass(eq=False)
class PauseWords:
    session: VoiceSession
    metrics: GatewayMetrics
    _task: asyncio.Task[None] | None = None

    def ask(
        self, utterance: Utterance, language: str | None, on_evidence: Callable[[float], None]
    ) -> None:
        """
        Args:
            language: of the speech; None: any.
            on_evidence: called in the event loop, unless another pause is asked for before.
        """
        if self._task is not None:
            self._task.cancel()
        parts = (part for message in utterance for part in message.parts)
        clips = tuple(part for part in parts if isinstance(part, AudioPart))
        self._task = background(self._ask(clips, language, on_evidence), "words")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_WIND_DOWN_S)

    async def _ask(
        self,
        clips: tuple[AudioPart, ...],
        language: str | None,
        on_evidence: Callable[[float], None],
    ) -> None:
        try:
            deltas = transcribe(self.session, clips, None, language=language)
            text = "".join([delta async for delta in deltas if isinstance(delta, str)])
        except LiveError as error:
            # Without words the sound decides.
            log.warning("pause_words_failed code=%s", error.code)
            self.metrics.pause_words.labels("failed").inc()
            return
        except Exception:
            log.exception("pause_words_crashed")
            self.metrics.pause_words.labels("failed").inc()
            return
        found = evidence(text, language)
        self.metrics.pause_words.labels("goes_on" if found else "none").inc()
        on_evidence(found)
