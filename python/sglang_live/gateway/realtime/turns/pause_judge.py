"""Whether a pause ends the turn of this session's user: what is asked about it, and when.

In: pauses, how long they last, the utterance up to them. Out: an end of the turn, or that it goes
on, by Endpointing.
Owner: one PauseJudge per connection with an endpoint model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from sglang_live.gateway.realtime.responses.speculation import Utterance
from sglang_live.gateway.realtime.session_config import SessionConfig
from sglang_live.gateway.realtime.turns.endpointing import Endpointing, JudgedPause
from sglang_live.gateway.realtime.turns.pause_words import PauseWords
from sglang_live.interaction.endpoint import MODEL_SAMPLES
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.vad import (
    SAMPLES_PER_MS,
    SpeechDetector,
    SpeechPaused,
    SpeechStopped,
)
from sglang_live.orchestrator.session import VoiceSession


@dataclass(frozen=True, slots=True)
class TurnSoFar:
    """
    utterance: up to the pause, as the model hears it.
    listening: the detector that the session uses now; None: none.
    """

    start_ms: int
    utterance: Utterance
    detector: SpeechDetector
    listening: Callable[[], SpeechDetector | None]

    def goes_on(self) -> bool:
        """Whether the session still uses the detector."""
        return self.listening() is self.detector


class PauseJudge:
    """
    Args:
        endpointing: None: there is no endpoint model, and nothing is judged.
        session: whose recogniser knows the words.
        on_stopped: called with the end of the turn.
        go_on: called if the evidence says that the turn goes on.
    """

    def __init__(
        self,
        endpointing: Endpointing | None,
        session: VoiceSession,
        buffer: InputBuffer,
        on_stopped: Callable[[SpeechStopped], None],
        go_on: Callable[[], None],
    ):
        self._endpointing = endpointing
        self._words = PauseWords(session, endpointing.metrics) if endpointing else None
        self._buffer, self._on_stopped, self._go_on = buffer, on_stopped, go_on
        self._latest: JudgedPause | None = None

    def begin(
        self, pause: SpeechPaused, turn: TurnSoFar, config: SessionConfig, is_recognised: bool
    ) -> None:
        """The turn has paused. Only for semantic_vad it is judged.

        Args:
            is_recognised: a recogniser hears turns up to their pauses.
        """
        detection, endpointing = config.turn_detection, self._endpointing
        if endpointing is None or detection is None or detection.kind != "semantic_vad":
            return
        self._latest = judged = JudgedPause(
            pause=pause,
            heard=partial(self._heard, turn.start_ms * SAMPLES_PER_MS),
            eagerness=detection.eagerness,
            detector=turn.detector,
            listens=turn.goes_on,
            on_stopped=self._on_stopped,
            go_on=self._go_on,
        )
        endpointing.grow(judged, pause.at_ms - pause.speech_end_ms)
        # Audio that turn prefill has not had recognised would be recognised for this alone.
        is_heard = is_recognised and not turn.utterance[-1].parts
        if is_heard and self._words is not None:
            language = (config.transcription or {}).get("language")
            self._words.ask(turn.utterance, language, partial(endpointing.take_words, judged))

    def grow(self, silence_ms: int) -> None:
        """The user has been silent for silence_ms."""
        if self._endpointing is not None and self._latest is not None and self._latest.lasts():
            self._endpointing.grow(self._latest, silence_ms)

    async def close(self) -> None:
        if self._words is not None:
            await self._words.close()

    def _heard(self, start: int, until_ms: int) -> np.ndarray:
        until = until_ms * SAMPLES_PER_MS
        return self._buffer.peek(max(start, until - MODEL_SAMPLES), until)
