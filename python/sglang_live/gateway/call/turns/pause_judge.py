"""Whether a pause ends the turn: what is asked about a user's pauses, and when.

In: pauses, how long they last, the utterance up to them. Out: the end of the turn, or that it goes
on.
Owner: one PauseJudge per connection. The endpoint model scores a pause, and again while it lasts;
a recogniser that has heard the turn up to the pause knows its words. From both comes the silence
that ends the turn (interaction/turn_end.py), anew with each of them. Evidence on a pause in which
the user has spoken again is dropped.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sglang_live.aio import background
from sglang_live.core import AudioPart
from sglang_live.gateway.call.responses.speculation import Utterance
from sglang_live.gateway.call.settings import SessionConfig, TurnConfig
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.transcribe import text_of
from sglang_live.interaction.endpoint import MODEL_SAMPLES, EndpointThreads
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.turn_end import (
    PAUSE_MS,
    SCORED_AT_MS,
    cutoff_ms,
    judged,
    silence_ms,
    word_evidence,
)
from sglang_live.interaction.vad import (
    SAMPLES_PER_MS,
    SpeechDetector,
    SpeechPaused,
    SpeechStopped,
    TurnDetection,
    VadSettings,
)
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)

_WIND_DOWN_S = 1.0


@dataclass(slots=True, eq=False)
class _Pause:
    """A pause that is judged, and what is known of it so far.

    turn_start: in samples.
    score: the least of the endpoint model; None: there is none yet.
    words: their evidence.
    n_scored: scores that were asked for.
    is_scoring: one of them is to come.
    """

    event: SpeechPaused
    detector: SpeechDetector
    turn_start: int
    eagerness: str
    score: float | None = None
    words: float = 0.0
    n_scored: int = 0
    is_scoring: bool = False


def speculates(detection: TurnDetection, config: TurnConfig) -> bool:
    """Whether a pause may start a speculative turn."""
    return detection.create_response and config.speculate_ms is not None


class PauseJudge:
    """
    Args:
        parts: with the endpoint model; without one nothing is judged.
        session: whose recogniser knows the words.
        on_end: called with the end of the turn.
        on_resume: called if the evidence says that the turn goes on.
    """

    def __init__(
        self,
        parts: GatewayParts,
        session: VoiceSession,
        buffer: InputBuffer,
        *,
        on_end: Callable[[SpeechStopped], None],
        on_resume: Callable[[], None],
    ):
        self._endpoint = parts.endpoint
        self._config = parts.config.turns
        self._clock = parts.clock
        self._metrics = parts.metrics
        self._session = session
        self._buffer = buffer
        self._on_end = on_end
        self._on_resume = on_resume
        self._latest: _Pause | None = None
        self._scores: set[asyncio.Task[None]] = set()
        self._words: asyncio.Task[None] | None = None  # only the latest pause has words

    def settings(self, detection: TurnDetection) -> VadSettings:
        """Of the session's speech detection: which silence is a pause, and which ends the turn."""
        if self._endpoint is not None and detection.kind == "semantic_vad":
            # The silence ends a turn whose verdict does not come.
            silent_ms = silence_ms(cutoff_ms(detection.eagerness))
            return replace(detection.vad, silence_duration_ms=silent_ms, pause_ms=PAUSE_MS)
        pause_ms = PAUSE_MS if self._config.prefills_at_pauses else None
        if speculates(detection, self._config):
            pause_ms = self._config.speculate_ms
        return replace(detection.vad, pause_ms=pause_ms)

    def begin(
        self,
        event: SpeechPaused,
        detector: SpeechDetector,
        turn_start: int,
        utterance: Utterance,
        config: SessionConfig,
    ) -> None:
        """The turn has paused. Only for semantic_vad it is judged.

        Args:
            turn_start: in samples.
            utterance: up to the pause, as the model hears it.
        """
        detection = config.turn_detection
        if self._endpoint is None or detection is None or detection.kind != "semantic_vad":
            return
        pause = _Pause(event, detector, turn_start, detection.eagerness)
        self._latest = pause
        self._score_if_due(pause, self._endpoint, event.at_ms - event.speech_end_ms)
        # Audio that turn prefill has not had recognised would be recognised for this alone.
        if self._config.prefills_at_pauses and not utterance[-1].parts:
            language = (config.transcription or {}).get("language")
            if self._words is not None:
                self._words.cancel()
            self._words = background(self._hear_words(pause, utterance, language), "words")

    def grow(self, silence_ms: int) -> None:
        """The user has been silent for silence_ms."""
        if self._endpoint is not None and self._latest is not None and self._lasts(self._latest):
            self._score_if_due(self._latest, self._endpoint, silence_ms)

    async def close(self) -> None:
        self._latest = None  # what is still being judged must not end a turn
        if self._words is not None:
            self._words.cancel()
            await asyncio.wait([self._words], timeout=_WIND_DOWN_S)

    def _lasts(self, pause: _Pause) -> bool:
        """Safe to call from a model's thread."""
        return self._latest is pause and pause.detector.is_in(pause.event)

    def _score_if_due(self, pause: _Pause, endpoint: EndpointThreads, silence_ms: int) -> None:
        n_due = sum(silence_ms >= at_ms for at_ms in SCORED_AT_MS)
        if n_due <= pause.n_scored or pause.is_scoring:
            return
        # A busy model is not asked for scores that are overdue.
        pause.n_scored = n_due
        pause.is_scoring = True
        end = (pause.event.speech_end_ms + silence_ms) * SAMPLES_PER_MS
        heard = self._buffer.peek(max(pause.turn_start, end - MODEL_SAMPLES), end)
        task = background(self._score(pause, endpoint, heard), "endpoint")
        self._scores.add(task)
        task.add_done_callback(self._scores.discard)

    async def _score(self, pause: _Pause, endpoint: EndpointThreads, heard: np.ndarray) -> None:
        began_s = self._clock.now_s()
        try:
            score = await endpoint.score(heard, lambda: self._lasts(pause))
        except Exception:
            # Without a verdict the turn ends by silence.
            log.exception("endpoint_model_failed")
            self._metrics.endpoint_verdicts.labels("failed").inc()
            return
        finally:
            pause.is_scoring = False
        if score is not None:
            self._metrics.endpoint_verdict_s.observe(self._clock.now_s() - began_s)
        if score is None or not self._lasts(pause):
            self._metrics.endpoint_verdicts.labels("overtaken").inc()
            return
        pause.score = score if pause.score is None else min(pause.score, score)
        self._decide(pause, pause.score)

    async def _hear_words(self, pause: _Pause, utterance: Utterance, language: str | None) -> None:
        """Turn prefill asks the recogniser for the same clips, and it hears each clip once."""
        parts = (part for message in utterance for part in message.parts)
        clips = tuple(part for part in parts if isinstance(part, AudioPart))
        text = await text_of(self._session, clips, language, self._metrics.pause_words)
        if text is None:
            return
        pause.words = word_evidence(text, language)
        self._metrics.pause_words.labels("goes_on" if pause.words else "none").inc()
        if pause.score is not None and pause.words and self._lasts(pause):
            self._decide(pause, pause.score)

    def _decide(self, pause: _Pause, score: float) -> None:
        verdict = judged(score, cutoff_ms(pause.eagerness), pause.words)
        stopped = pause.detector.wait(pause.event, verdict.wait_ms)
        self._metrics.endpoint_verdicts.labels("pause" if stopped is None else "complete").inc()
        if stopped is not None:
            self._on_end(stopped)
        elif not verdict.likely:
            self._on_resume()
