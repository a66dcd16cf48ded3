"""A voice while a response is audible: what it is, and what becomes of the response.

In: scores of the microphone's windows, the detector's events, the user's turns. Out: the scores of
what may be the user; responses held, released and interrupted; for clients that ask for it, events.
Owner: one OverResponse per connection, used by its TurnTaking.

The first sign of a voice holds the audio. A voice that lasts interrupts; how long it must last
depends on its sound (interaction/backchannel.py). One that ends before was a back-channel or noise.
The agent's own sound and that of other people in the room are not voices here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_live.aio import close_all
from sglang_live.clock import Clock
from sglang_live.gateway.realtime.outbox import Emit
from sglang_live.gateway.realtime.responses.playout import Playout
from sglang_live.gateway.realtime.session_config import SessionConfig
from sglang_live.gateway.realtime.turn_detection import TurnDetection
from sglang_live.gateway.realtime.turns.other_voices import OtherVoices
from sglang_live.gateway.realtime.turns.voice_words import VoiceWords
from sglang_live.interaction.backchannel import OUTLAST_MS, begins_at, has_hiss
from sglang_live.interaction.barge_in import BargeIn
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.user_voice import UserVoice
from sglang_live.interaction.vad import (
    SAMPLES_PER_MS,
    SpeechDetector,
    SpeechDismissed,
    SpeechSuspected,
)
from sglang_live.telemetry.metrics import GatewayMetrics

Scores = npt.NDArray[np.float32]

# Silence that a false alarm may cost the user, after what the client has buffered.
MAX_PAUSE_S = 0.3
# A suspicion ends by audio received, which a client may stop sending.
_MAX_HOLD_S = 1.0
# In the last moments of a complete response a short "yes" is an answer.
_ENDING_S = 1.0
# Words fade in and out.
_AROUND_WORDS = 200 * SAMPLES_PER_MS
_EVENT = "input_audio_buffer.voice_"


@dataclass(eq=False, kw_only=True)
class OverResponse:
    """
    interrupt: ends all responses; what was heard of them stays.
    buffer: with the microphone's audio.
    recognises: the model has a recogniser; without one, words are known if the client transcribes.
    others: whose voice it is; None: any voice may be the user's.
    on_words: called with a dismissed voice that is a turn after all.
    """

    playout: Playout
    interrupt: Callable[[], None]
    buffer: InputBuffer
    emit: Emit
    monitor: SessionMonitor
    clock: Clock
    metrics: GatewayMetrics
    words: VoiceWords
    recognises: bool
    others: OtherVoices | None
    on_words: Callable[[SpeechDismissed], None]

    def __post_init__(self) -> None:
        self._barge_in = BargeIn(
            self.playout,
            self.interrupt,
            self.monitor,
            self.clock,
            self.metrics,
            lambda: self._tell_ignored("undecided", "limit"),
        )
        self._user = UserVoice()
        self._recalled: str | None = None  # why the turn that starts, dismissed before, is one
        self._would_start = False  # the voice would be a turn if its speaker did not matter
        self._told_ms: int | None = None  # onset of a voice whose decision the client awaits
        self._judged_from = 0  # where the voice begins whose words are being recognised

    def prepare(self, detector: SpeechDetector, detection: TurnDetection) -> None:
        """Before windows are due: whether a voice interrupts, so that it needs confirmation."""
        detector.confirming = detection.interrupt_response and self.playout.audible

    async def voices(
        self, scores: Scores, detector: SpeechDetector, detection: TurnDetection
    ) -> Scores:
        """The scores of the windows that were due, 0 for what is no voice of the user."""
        threshold, end = detector.settings.threshold, detector.due_end
        if detection.ignore_echo:
            scores = await self.playout.echo.without_echo(scores, threshold, self.buffer, end)
        detector.outlast_ms = 0
        if not detector.confirming or detector.speaking:
            self._user.forget()
            if self.others:
                self.others.forget()
            self._would_start = False
            return scores
        scores = await self._of_the_user(scores, detector, detection)
        if (scores >= threshold).any():
            if detection.ignore_backchannels:
                detector.outlast_ms = self._outlast_ms(scores, detector, detection)
            self._wait_for_speaker(detector, detection)
        return scores

    def learn(self, pcm: npt.NDArray[np.int16], silence_ms: int, detection: TurnDetection) -> None:
        """A turn of the user, [n] int16 at 16 kHz, which ends with this silence."""
        pcm = pcm[: max(len(pcm) - silence_ms * SAMPLES_PER_MS, 0)]
        self._user.learn(pcm)
        if self.others and detection.knows_user:
            self.others.learn(pcm, of_user_only=detection.ignore_other_turns)

    def heard(self, event: SpeechSuspected | SpeechDismissed, config: SessionConfig) -> None:
        assert config.turn_detection is not None
        if isinstance(event, SpeechSuspected):
            self._suspected(event.onset_ms, config.turn_detection)
        else:
            self._dismissed(event, config)

    def started(self, onset_s: float, detector: SpeechDetector, detection: TurnDetection) -> None:
        """A turn starts, with or without an audible response."""
        self._told_ms = None  # the client learns it from speech_started
        if not detection.interrupt_response:
            self._barge_in.withdraw()
            return
        if self.playout.audible:
            reason = self._recalled or ("lasting" if detector.outlast_ms else "voice")
            self.metrics.voice_over_response.labels("turn", reason).inc()
        self._barge_in.interrupt(onset_s)

    @property
    def needed_from(self) -> int:
        """Where a dismissed voice that may be a turn yet begins; without one, the audio's end."""
        return self._judged_from if self.words.judging else self.buffer.end_sample

    def withdraw(self) -> None:
        """Nothing will be heard of a suspected voice any more."""
        self._barge_in.withdraw()
        self._tell_ignored("undecided", "withdrawn")

    async def close(self) -> None:
        others = (self.others.close,) if self.others else ()
        await close_all(self.withdraw, *others, self.words.close)

    def _suspected(self, onset_ms: int, detection: TurnDetection) -> None:
        longest_s = detection.vad.confirm_ms / 1000 + _MAX_HOLD_S
        if detection.ignore_backchannels:
            longest_s = min(longest_s, self.playout.buffered_s + MAX_PAUSE_S)
        self._barge_in.suspect(self.buffer.arrived_s(onset_ms, self.clock.now_s()), longest_s)
        if detection.tells_voices:
            self._told_ms = onset_ms
            self.emit(_EVENT + "suspected", audio_start_ms=onset_ms)

    def _dismissed(self, event: SpeechDismissed, config: SessionConfig) -> None:
        """The voice ended too early to be a turn."""
        if self._would_start:
            self._recall(event, "undecided")  # it was only too short to know its speaker
            return
        start, end = event.onset_ms * SAMPLES_PER_MS, event.speech_end_ms * SAMPLES_PER_MS
        decision = "noise" if has_hiss(self.buffer.peek(begins_at(start), end)) else "backchannel"
        self._barge_in.dismiss(decision, "short")
        self.metrics.voice_over_response.labels(decision, "short").inc()
        self._tell_ignored(decision, "short", event.speech_end_ms)
        assert config.turn_detection is not None
        transcription = config.transcription
        if not config.turn_detection.ignore_backchannels:
            return
        if self.recognises or transcription is not None:
            if not self.words.judging:
                padding_ms = config.turn_detection.vad.prefix_padding_ms
                self._judged_from = start - padding_ms * SAMPLES_PER_MS
            voice = self.buffer.peek(start - _AROUND_WORDS, end + _AROUND_WORDS)
            language = transcription.get("language") if transcription else None
            self.words.judge(voice, language, lambda: self._recall(event, "words"))

    def _recall(self, event: SpeechDismissed, why: str) -> None:
        self._recalled, self._would_start = why, False
        self.on_words(event)
        self._recalled = None

    async def _of_the_user(
        self, scores: Scores, detector: SpeechDetector, detection: TurnDetection
    ) -> Scores:
        """0 for the voices of other people, as far as they can be told."""
        threshold, end = detector.settings.threshold, detector.due_end
        pcm = self.buffer.peek(end - len(scores) * WINDOW_SAMPLES, end)
        if len(pcm) < len(scores) * WINDOW_SAMPLES:
            return scores  # it has left the buffer
        is_certain = False
        if self.others and detection.ignore_other_voices and detection.vad.confirm_ms:
            before = self.others.state
            if await self.others.hear(pcm, scores >= threshold) == "far":
                if before != "far":
                    self._is_another_voice(detector)
                return np.where(scores >= threshold, np.float32(0), scores)
            is_certain = self.others.is_certain
        # A user who has moved away is as soft and dull as another person.
        if detection.ignore_side_talk and self._user.is_known and not is_certain:
            scores = self._without_side_talk(scores, threshold, pcm)
        return scores

    def _is_another_voice(self, detector: SpeechDetector) -> None:
        self.metrics.voice_over_response.labels("other_voice", "far").inc()
        self.monitor.other_sound("other_voice")
        self._would_start = False
        if dismissed := detector.dismiss():
            self._barge_in.dismiss("other_voice", "far")
            self._tell_ignored("other_voice", "far", dismissed.speech_end_ms)

    def _wait_for_speaker(self, detector: SpeechDetector, detection: TurnDetection) -> None:
        """A voice whose speaker is not known yet must last until they are."""
        if not (self.others and detection.ignore_other_voices and detection.vad.confirm_ms):
            return
        needed_ms = max(detection.vad.confirm_ms, detector.outlast_ms)
        waits_ms = self.others.outlast_ms
        self._would_start = waits_ms > needed_ms and self.others.voiced_ms >= needed_ms
        detector.outlast_ms = max(detector.outlast_ms, waits_ms)

    def _without_side_talk(
        self, scores: Scores, threshold: float, pcm: npt.NDArray[np.int16]
    ) -> Scores:
        n_before = self._user.n_far
        scores = self._user.without_others(scores, threshold, pcm)
        if self._user.n_far and not n_before:
            self.metrics.voice_over_response.labels("side_talk", "far").inc()
            self.monitor.other_sound("side_talk")
        return scores

    def _outlast_ms(
        self, scores: Scores, detector: SpeechDetector, detection: TurnDetection
    ) -> int:
        """Voice for which a turn must last, if it is more than confirm_ms."""
        is_ending = self.playout.whole and self.playout.buffered_s <= _ENDING_S
        if is_ending or not detection.vad.confirm_ms:
            return 0
        onset, end = detector.onset_sample, detector.due_end
        if onset is None:
            n_voiced = len(scores) - int((scores >= detector.settings.threshold).argmax())
            onset = end - n_voiced * WINDOW_SAMPLES
        return 0 if has_hiss(self.buffer.peek(begins_at(onset), end)) else OUTLAST_MS

    def _tell_ignored(self, decision: str, reason: str, end_ms: int | None = None) -> None:
        """Tell a client that was told of a suspicion that it was none."""
        if self._told_ms is None:
            return
        onset_ms, self._told_ms = self._told_ms, None
        if end_ms is None:
            end_ms = self.buffer.end_sample // SAMPLES_PER_MS
        self.emit(
            _EVENT + "ignored",
            decision=decision,
            reason=reason,
            audio_start_ms=onset_ms,
            audio_end_ms=end_ms,
        )
