"""Barge-in: what a voice over a response is, and what becomes of the response.

In: scores of the microphone's windows, the detector's events, the user's turns. Out: the scores of
what may be the user; responses held, released and interrupted; for clients that ask for it, facts.
Owner: one BargeIn per connection, used by its TurnTaking.

The first sign of a voice holds the audio. The client has some buffered, so that a cough causes no
audible gap. A voice that lasts interrupts; how long it must last depends on its sound
(interaction/filters). One that ends before was a back-channel or noise, unless its words take the
turn.
"""

from collections.abc import Callable, Sequence

from sglang_live.aio import Timer, close_all
from sglang_live.clock import Clock
from sglang_live.gateway.call.ports import UserPort
from sglang_live.gateway.call.responses.audible import AudibleResponses
from sglang_live.gateway.call.responses.responses import Responses
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.call.turns.voice_words import VoiceWords
from sglang_live.gateway.parts import GatewayParts
from sglang_live.interaction.filters.backchannels import begins_at, has_hiss
from sglang_live.interaction.filters.voice_filter import (
    Frame,
    Heard,
    Pcm,
    Scores,
    TurnCheck,
    VoiceFilter,
    heard,
)
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.vad import (
    SAMPLES_PER_MS,
    SpeechDismissed,
    SpeechSuspected,
    TurnDetection,
)
from sglang_live.telemetry.metrics import GatewayMetrics

# Silence that a false alarm may cost the user, after what the client has buffered.
MAX_PAUSE_S = 0.3
# A suspicion ends by audio received, which a client may stop sending.
_MAX_HOLD_S = 1.0
# Words fade in and out.
_AROUND_WORDS = 200 * SAMPLES_PER_MS


class BargeIn:
    """
    Args:
        filters: all that the server has, in the order in which they hear a voice.
        buffer: with the microphone's audio.
        on_words: called with a dismissed voice that is a turn after all.
    """

    def __init__(
        self,
        parts: GatewayParts,
        responses: Responses,
        filters: Sequence[VoiceFilter],
        words: VoiceWords,
        buffer: InputBuffer,
        monitor: SessionMonitor,
        port: UserPort,
        on_words: Callable[[SpeechDismissed], None],
    ):
        self._recognises = parts.config.model.recognises
        self._clock = parts.clock
        self._metrics = parts.metrics
        self._audible = responses.audible
        self._all_filters = tuple(filters)
        self._filters: tuple[VoiceFilter, ...] = ()  # those that are on
        self._words = words
        self._buffer = buffer
        self._monitor = monitor
        self._port = port
        self._on_words = on_words
        self._hold = AudioHold(
            responses.audible,
            responses.interrupt,
            monitor,
            parts.clock,
            parts.metrics,
            lambda: self._tell_ignored("undecided", "limit"),
        )
        self._outlast_ms = 0  # of the newest frame
        self._recalled: str | None = None  # why the turn that starts, dismissed before, is one
        self._told_ms: int | None = None  # onset of a voice whose decision the client awaits
        self._judged_from = 0  # where the voice begins whose words are being recognised

    def configure(self, detection: TurnDetection) -> None:
        self._filters = tuple([each for each in self._all_filters if each.configure(detection)])

    async def hear(self, frame: Frame, scores: Scores) -> Heard:
        """scores: of the frame's windows, by the speech model."""
        if not frame.over_response:
            for each in self._all_filters:
                each.forget()
        result = await heard(self._filters, frame, scores)
        self._outlast_ms = result.outlast_ms
        for found in frame.found:
            self._metrics.voice_over_response.labels(found.what, found.reason).inc()
            self._monitor.other_sound(found.what)
        return result

    def learn(self, turn: Pcm, silence_ms: int) -> None:
        """A turn of the user, [n] int16 at 16 kHz, which ends with this silence."""
        for each in self._all_filters:
            each.learn(turn[: max(len(turn) - silence_ms * SAMPLES_PER_MS, 0)])

    def turn_checks(self) -> list[TurnCheck]:
        """What a turn that ends now must fulfil to be one of the user."""
        return [check for each in self._all_filters for check in each.turn_checks()]

    def suspected(self, event: SpeechSuspected, detection: TurnDetection) -> None:
        longest_s = detection.vad.confirm_ms / 1000 + _MAX_HOLD_S
        if detection.ignore_backchannels:
            longest_s = min(longest_s, self._audible.buffered_s + MAX_PAUSE_S)
        onset_s = self._buffer.arrived_s(event.onset_ms, self._clock.now_s())
        self._hold.begin(onset_s, longest_s)
        if detection.tells_voices:
            self._told_ms = event.onset_ms
            self._port.voice_suspected(event.onset_ms)

    def dismissed(self, event: SpeechDismissed, config: SessionConfig) -> None:
        """The suspected voice is no turn, as far as its sound tells."""
        if event.voice:
            self._hold.dismiss(event.voice, "far")
            self._tell_ignored(event.voice, "far", event.speech_end_ms)
        elif any(each.is_undecided for each in self._filters):
            self._recall(event, "undecided")  # it was only too short to know its speaker
        else:
            self._too_short(event, config)

    def started(self, onset_s: float, detection: TurnDetection) -> None:
        """A turn starts, with or without an audible response."""
        self._told_ms = None  # the client learns it from speech_started
        if not detection.interrupt_response:
            self._hold.withdraw()
            return
        if self._audible.any:
            reason = self._recalled or ("lasting" if self._outlast_ms else "voice")
            self._metrics.voice_over_response.labels("turn", reason).inc()
        self._hold.interrupt(onset_s)

    @property
    def needed_from(self) -> int:
        """Where a dismissed voice that may be a turn yet begins; without one, the audio's end."""
        return self._judged_from if self._words.judging else self._buffer.end_sample

    def withdraw(self) -> None:
        """Nothing will be heard of a suspected voice any more."""
        self._hold.withdraw()
        self._tell_ignored("undecided", "withdrawn")

    async def close(self) -> None:
        filters = (each.close for each in self._all_filters)
        await close_all(self.withdraw, *filters, self._words.close)

    def _too_short(self, event: SpeechDismissed, config: SessionConfig) -> None:
        start, end = event.onset_ms * SAMPLES_PER_MS, event.speech_end_ms * SAMPLES_PER_MS
        decision = "noise" if has_hiss(self._buffer.peek(begins_at(start), end)) else "backchannel"
        self._hold.dismiss(decision, "short")
        self._metrics.voice_over_response.labels(decision, "short").inc()
        self._tell_ignored(decision, "short", event.speech_end_ms)
        detection, transcription = config.turn_detection, config.transcription
        assert detection is not None
        if not detection.ignore_backchannels:
            return
        # Without a recogniser of the model, words are known if the client transcribes.
        if self._recognises or transcription is not None:
            if not self._words.judging:
                self._judged_from = start - detection.vad.prefix_padding_ms * SAMPLES_PER_MS
            voice = self._buffer.peek(start - _AROUND_WORDS, end + _AROUND_WORDS)
            language = transcription.get("language") if transcription else None
            self._words.judge(voice, language, lambda: self._recall(event, "words"))

    def _recall(self, event: SpeechDismissed, why: str) -> None:
        self._recalled = why
        for each in self._all_filters:
            each.is_undecided = False
        self._on_words(event)
        self._recalled = None

    def _tell_ignored(self, decision: str, reason: str, end_ms: int | None = None) -> None:
        """Tell a client that was told of a suspicion that it was none."""
        if self._told_ms is None:
            return
        onset_ms, self._told_ms = self._told_ms, None
        if end_ms is None:
            end_ms = self._buffer.end_sample // SAMPLES_PER_MS
        self._port.voice_ignored(decision, reason, onset_ms, end_ms)


class AudioHold:
    """Audio that is kept in the gateway while it is not known whether a voice is a barge-in.

    Args:
        interrupt: ends all responses; what was heard of them stays.
        on_limit: called when the audio was held for as long as it may be.
    """

    def __init__(
        self,
        audible: AudibleResponses,
        interrupt: Callable[[], None],
        monitor: SessionMonitor,
        clock: Clock,
        metrics: GatewayMetrics,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self._audible = audible
        self._interrupt = interrupt
        self._monitor = monitor
        self._clock = clock
        self._metrics = metrics
        self._on_limit = on_limit
        self._held_since_s: float | None = None
        self._limit = Timer(clock, self._limit_reached, "longest suspicion")

    def begin(self, onset_s: float, longest_s: float) -> None:
        """There may be a voice since onset_s.

        Args:
            longest_s: of the hold. A suspicion ends by audio received, which a client may stop
                sending.
        """
        self._monitor.speech_suspected(onset_s)
        if self._held_since_s is None:
            self._held_since_s = self._clock.now_s()
            self._audible.hold()
            self._monitor.held()
            self._limit.arm(longest_s)

    def dismiss(self, decision: str, reason: str) -> None:
        """The suspected voice was no turn."""
        self._metrics.false_alarms.inc()
        self._monitor.speech_dismissed(decision, reason)
        self.withdraw()

    def withdraw(self) -> None:
        """End a suspicion that will neither be confirmed nor dismissed."""
        if self._held_since_s is not None:
            self._end()
            self._monitor.released()

    def interrupt(self, onset_s: float) -> None:
        """The user has spoken since onset_s: end all responses, also those without audio yet."""
        now_s = self._clock.now_s()
        if self._held_since_s is not None or self._audible.any:
            stopped_s = now_s if self._held_since_s is None else self._held_since_s
            self._metrics.barge_ins.inc()
            self._metrics.stop_latency_s.observe(max(0.0, stopped_s - onset_s))
            self._metrics.barge_in_latency_s.observe(max(0.0, now_s - onset_s))
        # Before the release, which would send the audio: an interruption discards what is held.
        self._interrupt()
        if self._held_since_s is not None:
            self._end()

    def _end(self) -> None:
        assert self._held_since_s is not None
        self._metrics.audio_on_hold_s.inc(self._clock.now_s() - self._held_since_s)
        self._held_since_s = None
        self._limit.disarm()
        self._audible.release()

    def _limit_reached(self) -> None:
        self.withdraw()
        self._on_limit()
