"""Starts and stops of speech in the user's audio, as OpenAI's server_vad defines them.

In: 16 kHz int16 audio of any length. Out: SpeechEvent.
Owner: one SpeechDetector per session. Its owner has the `due` windows scored and passes the
scores to `scored`. Time is audio received, never wall clock: a client may send faster or slower
than real time.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.interaction.silero import (
    CONTEXT_SAMPLES,
    WINDOW_SAMPLES,
    SpeechModel,
    SpeechScores,
    SpeechState,
    SpeechWindows,
)

SAMPLES_PER_MS = INPUT_RATE_HZ // 1000
# Speech goes on until the probability falls this far below the threshold: without hysteresis a
# single soft syllable would end the turn.
HYSTERESIS = 0.15
# With a threshold of 0 digital silence would be speech.
MIN_THRESHOLD = 0.05
# A consonant may fall below the threshold; after more than two windows the onset is a new one.
_MAX_ONSET_GAP_SAMPLES = 2 * WINDOW_SAMPLES
# A suspicion ends after this much silence, which is longer than any pause within a word.
DISMISS_SILENCE_MS = 200
# One model call scores at most about 2 s, so that a long append cannot delay other sessions.
_MAX_WINDOWS_PER_CALL = 64
# Several windows in one call cost little more than one. With more than this, too many would be
# left to score when the turn ends.
_MAX_WINDOWS_LEFT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VadSettings:
    """
    min_speech_ms: voiced time before a turn starts, so that clicks and coughs start none.
    confirm_ms: the same while a response is audible, where a false start ends the response.
    pause_ms: silence before SpeechPaused; None: there is no such event.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    min_speech_ms: int = 96
    confirm_ms: int = 250
    pause_ms: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be within 0..1, got {self.threshold}")
        for name in ("prefix_padding_ms", "silence_duration_ms", "min_speech_ms", "confirm_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")


DetectionKind = Literal["server_vad", "semantic_vad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDetection:
    """How the turns of a session are detected: the protocol's `turn_detection`.

    create_response: a response starts when speech stops.
    interrupt_response: speech interrupts a response.
    ignore_echo: the agent's own sound in the user's audio is no voice.
    ignore_backchannels: a listener's short sound does not interrupt.
    ignore_side_talk: over a response, a voice far softer and duller than the user's is no voice.
    ignore_other_voices: over a response, a voice unlike the user's is no voice. The default says
        whether the server has the speaker model that it takes.
    ignore_other_turns: a turn in a voice unlike the user's has no response, and is not in the
        model's history.
    shown: extensions of the protocol that the client has set, and which its echo has therefore.
    """

    kind: DetectionKind = "server_vad"
    vad: VadSettings
    eagerness: str = "auto"
    idle_timeout_ms: int | None = None
    create_response: bool = True
    interrupt_response: bool = True
    ignore_echo: bool = True
    ignore_backchannels: bool = True
    ignore_side_talk: bool = True
    ignore_other_voices: bool = False
    ignore_other_turns: bool = False
    shown: tuple[str, ...] = ()

    @property
    def takes_noise(self) -> bool:
        """Whether noise may count as speech: the threshold is below the default."""
        return self.vad.threshold < VadSettings().threshold

    @property
    def judges_turns(self) -> bool:
        """Whether a turn may turn out to be none."""
        return self.takes_noise or self.ignore_other_turns

    @property
    def knows_user(self) -> bool:
        """Whether the user's voice is learnt."""
        return self.ignore_other_voices or self.ignore_other_turns

    @property
    def tells_voices(self) -> bool:
        """Whether the client is told of voices over a response: it knows the extension."""
        return self.ignore_backchannels and "ignore_backchannels" in self.shown


@dataclass(frozen=True, slots=True)
class SpeechSuspected:
    """There is a voice, shorter than confirm_ms so far; only while a response is audible.

    SpeechStarted or SpeechDismissed follows.
    """

    onset_ms: int


@dataclass(frozen=True, slots=True)
class SpeechDismissed:
    """The suspected voice is no turn.

    speech_end_ms: its last sound so far.
    voice: what it is, such as "other_voice"; "": it ended too early to be a turn.
    """

    onset_ms: int
    speech_end_ms: int
    voice: str = ""


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """A turn starts. at_ms: the onset less the padding. onset_ms: the first voiced window."""

    at_ms: int
    onset_ms: int


EndReason = Literal["silence", "verdict", "client", "no_audio", "too_long", "words"]


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The turn ends.

    at_ms: end of its audio with silence.
    speech_end_ms: last voiced sound.
    reason: `verdict`: the silence that was set for this pause; `client`: it committed, cleared or
        reconfigured; `words`: the turn was dismissed before its words were known.
    """

    at_ms: int
    speech_end_ms: int
    reason: EndReason = "silence"


@dataclass(frozen=True, slots=True)
class SpeechPaused:
    """The turn may be over: the user has been silent for pause_ms. Once per silence."""

    at_ms: int
    speech_end_ms: int


@dataclass(frozen=True, slots=True)
class SpeechResumed:
    """The user speaks on after a SpeechPaused: the turn is not over. silence_ms: of the pause."""

    silence_ms: int


SpeechEvent = (
    SpeechSuspected | SpeechDismissed | SpeechStarted | SpeechPaused | SpeechResumed | SpeechStopped
)


class SpeechDetector:
    """
    settings: replaceable at any time.
    confirming: a response is audible, so that a turn needs confirm_ms of voice.
    """

    def __init__(self, model: SpeechModel, settings: VadSettings, *, start_sample: int = 0) -> None:
        self._model = model
        self.settings = settings
        self.confirming = False
        self._outlast_ms = 0  # voice that a turn needs while confirming
        self.reset(start_sample)

    def reset(self, start_sample: int) -> None:
        """Clear all state; the next audio begins at start_sample of the session's audio."""
        self._state = self._model.initial_state()
        self._context = np.zeros(CONTEXT_SAMPLES, np.float32)
        self._pending = np.zeros(0, np.int16)
        self._position = start_sample  # end of the last scored window
        self._n_due = 0  # windows that are being scored
        self._floor = start_sample  # earlier audio belongs to an earlier turn
        self._leave_speech()

    def _leave_speech(self) -> None:
        self._speaking = False
        self._suspected = False
        self._in_silence = False
        self._paused = False
        self._wait_ms: int | None = None  # silence that ends the turn in this pause
        self._onset: int | None = None
        self._voiced_samples = 0
        self._speech_end = self._position

    @property
    def speaking(self) -> bool:
        return self._speaking

    @property
    def silence_ms(self) -> int:
        """How long the user of a turn has been silent; 0: not now."""
        silence = self._position - self._speech_end if self._in_silence else 0
        return silence // SAMPLES_PER_MS

    @property
    def onset_sample(self) -> int | None:
        """Where the voice began of which it is not known yet whether it is a turn; None: none."""
        return None if self._speaking else self._onset

    @property
    def earliest_turn(self) -> int:
        """Position from which audio may belong to the turn that is to come, in samples."""
        onset = self._position if self._onset is None else self._onset
        return max(onset - self.settings.prefix_padding_ms * SAMPLES_PER_MS, self._floor)

    @property
    def due_end(self) -> int:
        """Position of the end of the windows that were due, in the session's audio, in samples."""
        return self._position + self._n_due * WINDOW_SAMPLES

    def feed(self, pcm: np.ndarray) -> list[SpeechEvent]:
        """Take audio, score it here, and return its events. pcm: [n] int16, 16 kHz."""
        self.take(pcm)
        events = []
        while (due := self.due()) is not None:
            events += self.scored(*self._score(*due))
        return events

    def take(self, pcm: np.ndarray) -> None:
        """Add audio, to be scored when it is `due`. pcm: [n] int16, 16 kHz."""
        self._pending = np.concatenate((self._pending, pcm))

    def due(self) -> SpeechWindows | None:
        """Remove the windows to be scored next; their scores must come before any other call.

        Returns:
            None while the windows are too few for an event, so that leaving them delays none.
        """
        n_windows = len(self._pending) // WINDOW_SAMPLES
        if n_windows < self._windows_to_event():
            return None
        self._n_due = min(n_windows, _MAX_WINDOWS_PER_CALL)
        return self._cut(self._n_due), self._state

    def scored(
        self, probabilities: np.ndarray, state: SpeechState, outlast_ms: int = 0, voice: str = ""
    ) -> list[SpeechEvent]:
        """Return the events of the scores of the windows that were due.

        Args:
            outlast_ms: while confirming, a turn needs this much voice if it is more than
                confirm_ms.
            voice: what the voice so far is, which is no turn; "": it may be one.
        """
        self._state = state
        self._n_due = 0
        self._outlast_ms = outlast_ms
        dismissed = self._dismiss(voice) if voice and not self._speaking else None
        steps = (self._step(probability) for probability in probabilities.tolist())
        return [event for event in (dismissed, *steps) if event is not None]

    def force_stop(self, reason: EndReason) -> SpeechStopped:
        """End the turn at the end of the audio so far."""
        assert self._speaking
        n_windows = len(self._pending) // WINDOW_SAMPLES
        if n_windows:
            probabilities, self._state = self._score(self._cut(n_windows), self._state)
            for probability in probabilities:
                event = self._step(float(probability))
                if isinstance(event, SpeechStopped):  # under settings that were replaced meanwhile
                    return event
        return self._stop(self._position, reason)

    def wait(self, pause: SpeechPaused, silence_ms: int) -> SpeechStopped | None:
        """End the turn in this pause after silence_ms in place of silence_duration_ms.

        Returns:
            The end if the silence has lasted as long; else, and if the user spoke on, None.
        """
        if not self.is_in(pause):
            return None
        if self._position - self._speech_end >= silence_ms * SAMPLES_PER_MS:
            return self._stop(self._position, "verdict")
        self._wait_ms = silence_ms
        return None

    def is_in(self, pause: SpeechPaused) -> bool:
        """Whether the user has been silent since. Safe to call from another thread."""
        last_ms = self._speech_end // SAMPLES_PER_MS
        return self._speaking and self._paused and last_ms == pause.speech_end_ms

    def recall(self, dismissed: SpeechDismissed) -> tuple[SpeechStarted, SpeechStopped] | None:
        """The dismissed voice was a turn after all.

        Returns:
            None if the user speaks now, or has had a turn since.
        """
        onset = dismissed.onset_ms * SAMPLES_PER_MS
        if self._speaking or onset < self._floor:
            return None
        started = self._started(onset)
        end_ms = dismissed.speech_end_ms + DISMISS_SILENCE_MS
        self._floor = end_ms * SAMPLES_PER_MS
        return started, SpeechStopped(end_ms, dismissed.speech_end_ms, "words")

    def _score(self, windows: np.ndarray, state: SpeechState) -> SpeechScores:
        (scored,) = self._model.score([(windows, state)])
        return scored

    def _cut(self, n_windows: int) -> np.ndarray:
        """The next windows, [n, CONTEXT_SAMPLES + WINDOW_SAMPLES] float32."""
        taken = n_windows * WINDOW_SAMPLES
        audio = self._pending[:taken].astype(np.float32) / 32768.0
        self._pending = self._pending[taken:]
        with_context = np.concatenate((self._context, audio))
        self._context = with_context[-CONTEXT_SAMPLES:]
        # The same as sliding_window_view, whose checks take a fifth of the time of the network.
        shape, strides = (n_windows, CONTEXT_SAMPLES + WINDOW_SAMPLES), (4 * WINDOW_SAMPLES, 4)
        return np.ascontiguousarray(np.ndarray(shape, np.float32, with_context, 0, strides))

    def _windows_to_event(self) -> int:
        """The least number of windows that can bring an event, at most _MAX_WINDOWS_LEFT."""
        settings, left = self.settings, []
        if not self._speaking:
            needed_ms = settings.min_speech_ms
            if self._suspected:
                needed_ms = settings.confirm_ms if self.confirming else 0
                left.append(self._speech_end + DISMISS_SILENCE_MS * SAMPLES_PER_MS - self._position)
            left.append(needed_ms * SAMPLES_PER_MS - self._voiced_samples)
        elif self._paused:
            return 1  # each may hold the SpeechResumed
        else:
            silence_start = self._speech_end if self._in_silence else self._position
            in_silence = self._position - silence_start
            left.append(settings.silence_duration_ms * SAMPLES_PER_MS - in_silence)
            if settings.pause_ms is not None:
                left.append(settings.pause_ms * SAMPLES_PER_MS - in_silence)
        return min(max(1, -(-min(left) // WINDOW_SAMPLES)), _MAX_WINDOWS_LEFT)

    def _step(self, probability: float) -> SpeechEvent | None:
        self._position += WINDOW_SAMPLES
        threshold = max(self.settings.threshold, MIN_THRESHOLD)
        voiced = probability >= threshold
        silent = probability < max(threshold - HYSTERESIS, MIN_THRESHOLD / 2)
        if self._speaking:
            return self._step_speaking(voiced, silent)
        return self._step_listening(voiced, silent)

    def _step_listening(self, voiced: bool, silent: bool) -> SpeechEvent | None:
        if voiced:
            return self._hear_voice()
        since_voice = self._position - self._speech_end
        if self._suspected:
            return self._dismiss() if since_voice >= DISMISS_SILENCE_MS * SAMPLES_PER_MS else None
        if silent or since_voice > _MAX_ONSET_GAP_SAMPLES:
            self._leave_speech()
        return None

    def _hear_voice(self) -> SpeechStarted | SpeechSuspected | None:
        if self._onset is None:
            self._onset = self._position - WINDOW_SAMPLES
        self._voiced_samples += WINDOW_SAMPLES
        self._speech_end = self._position
        voiced_ms = self._voiced_samples / SAMPLES_PER_MS
        if voiced_ms < self.settings.min_speech_ms:
            return None
        if not self.confirming or voiced_ms >= max(self.settings.confirm_ms, self._outlast_ms):
            return self._start(self._onset)
        if self._suspected:
            return None
        self._suspected = True
        return SpeechSuspected(self._onset // SAMPLES_PER_MS)

    def _dismiss(self, voice: str = "") -> SpeechDismissed | None:
        """The voice is no turn, however long it lasts. Returns it if it was suspected."""
        onset, end = self._onset, self._speech_end
        suspected = self._suspected
        self._leave_speech()
        if onset is None or not suspected:
            return None
        return SpeechDismissed(onset // SAMPLES_PER_MS, end // SAMPLES_PER_MS, voice)

    def _step_speaking(self, voiced: bool, silent: bool) -> SpeechEvent | None:
        if voiced:
            silence = self._position - WINDOW_SAMPLES - self._speech_end
            resumed = SpeechResumed(silence // SAMPLES_PER_MS) if self._paused else None
            self._speech_end = self._position
            self._in_silence = False
            self._paused = False
            self._wait_ms = None
            return resumed
        if silent and not self._in_silence:
            self._in_silence = True
            self._speech_end = self._position - WINDOW_SAMPLES
        if not self._in_silence:
            return None
        waits_ms = self._wait_ms
        silence_ms = self.settings.silence_duration_ms if waits_ms is None else waits_ms
        end = self._speech_end + silence_ms * SAMPLES_PER_MS
        if self._position >= end:
            return self._stop(end, "silence" if waits_ms is None else "verdict")
        return self._pause()

    def _pause(self) -> SpeechPaused | None:
        pause_ms = self.settings.pause_ms
        if pause_ms is None or self._paused:
            return None
        if self._position < self._speech_end + pause_ms * SAMPLES_PER_MS:
            return None
        self._paused = True
        return SpeechPaused(self._position // SAMPLES_PER_MS, self._speech_end // SAMPLES_PER_MS)

    def _start(self, onset: int) -> SpeechStarted:
        self._speaking = True
        self._suspected = False
        self._in_silence = False
        self._paused = False
        return self._started(onset)

    def _started(self, onset: int) -> SpeechStarted:
        padded = onset - self.settings.prefix_padding_ms * SAMPLES_PER_MS
        return SpeechStarted(
            at_ms=-(-max(padded, self._floor) // SAMPLES_PER_MS),
            onset_ms=onset // SAMPLES_PER_MS,
        )

    def _stop(self, end: int, reason: EndReason = "silence") -> SpeechStopped:
        speech_end_ms = self._speech_end // SAMPLES_PER_MS
        stopped = SpeechStopped(end // SAMPLES_PER_MS, speech_end_ms, reason)
        self._floor = end
        self._leave_speech()
        return stopped
