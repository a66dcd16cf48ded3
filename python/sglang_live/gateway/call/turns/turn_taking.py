"""Turn taking: from the user's audio to turns.

In: audio in the format of the wire. Out: committed items, responses created and interrupted.
Owner: one TurnTaking per connection. Time is audio received (see interaction/vad.py).

A microphone frame goes this way: hear() decodes it into the buffer, _listen() has it scored, asks
BargeIn (barge_in.py) what of it may be the user, and gives that to the SpeechDetector
(interaction/vad.py), whose events become turns here.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sglang_live.aio import Timer, close_all
from sglang_live.core import INPUT_RATE_HZ, AudioPart
from sglang_live.gateway.audio.codec import WireDecoder
from sglang_live.gateway.call.conversation.changes import ConversationChanges
from sglang_live.gateway.call.conversation.items import AudioContent, MessageItem
from sglang_live.gateway.call.ports import UserPort
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.call.responses.responses import Responses
from sglang_live.gateway.call.responses.speculation import Utterance
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.call.turns.barge_in import BargeIn
from sglang_live.gateway.call.turns.duplex_mode import DuplexMode
from sglang_live.gateway.call.turns.frame_mode import FrameMode, NoTurnsError
from sglang_live.gateway.call.turns.input_transcription import InputTranscription
from sglang_live.gateway.call.turns.missing_audio import MissingAudio
from sglang_live.gateway.call.turns.pause_judge import PauseJudge, speculates
from sglang_live.gateway.call.turns.turn_prefill import TurnPrefill
from sglang_live.gateway.call.turns.voice_words import VoiceWords
from sglang_live.gateway.parts import GatewayParts
from sglang_live.ids import new_id
from sglang_live.interaction.filters.voice_filter import Frame, VoiceFilter
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.presence import has_speech
from sglang_live.interaction.vad import (
    SAMPLES_PER_MS,
    SpeechDetector,
    SpeechDismissed,
    SpeechEvent,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    SpeechStopped,
    SpeechSuspected,
)

log = logging.getLogger(__name__)

# A long append is decoded in slices, between which the event loop serves other work.
_SLICE_MS = 1000
# Silence that voice detection keeps: a client may commit an utterance that is too soft to be found.
_KEPT_MS = 10_000


@dataclass(eq=False)
class TurnTaking:
    """
    config: the session's settings; replaced by configure().
    filters: what tells the user's voice from other sounds.
    """

    config: SessionConfig
    parts: GatewayParts
    changes: ConversationChanges
    responses: Responses
    frames: FrameMode | DuplexMode
    transcripts: InputTranscription
    filters: Sequence[VoiceFilter]
    monitor: SessionMonitor
    port: UserPort

    def __post_init__(self) -> None:
        self._settings = self.parts.config.turns
        self._limits = self.parts.config.inputs
        self._clock = self.parts.clock
        self._metrics = self.parts.metrics
        self._turn_runner = self.responses.turn_runner
        self._buffer = InputBuffer(self._limits.max_input_audio_s)
        self._decoder = WireDecoder(self.config.input_format)
        self._detector: SpeechDetector | None = None
        self._next_item()
        self._turn_start_ms = 0
        self._pause_ms: int | None = None  # where the model stops to hear, if the turn ends here
        self._turn_prefill = TurnPrefill(self._settings, self._turn_runner)
        session = self._turn_runner.session
        self._judge = PauseJudge(
            self.parts,
            session,
            self._buffer,
            on_end=self._on_stopped,
            on_resume=self._turn_runner.withdraw_speculative,
        )
        self._barge_in = BargeIn(
            self.parts,
            self.responses,
            self.filters,
            VoiceWords(session, self._clock, self._metrics),
            self._buffer,
            self.monitor,
            self.port,
            self._on_words,
        )
        self._idle = Timer(self._clock, self._on_idle, "idle timer")
        self._missing_audio = MissingAudio(self._clock, self._on_missing_audio)
        self._is_away = False
        self.responses.on_done = self._on_response_done
        self.configure(self.config)

    @property
    def holds_audio(self) -> bool:
        """Whether audio that has come will be part of a turn that is not committed."""
        if self._detector is not None:
            return self._detector.speaking
        return not self.frames.on and self._buffer.end_sample > self._buffer.start_sample

    def check(self, config: SessionConfig) -> None:
        """Raises ClientEventError for settings that the model's mode does not have."""
        if isinstance(self.frames, DuplexMode):
            self.frames.check(config)

    def configure(self, config: SessionConfig) -> None:
        """Apply the session's settings from the next sample on."""
        if config.input_format != self._decoder.form:
            self._take(self._decoder.finish())
            self._decoder = WireDecoder(config.input_format)
        if config != self.config:
            self._turn_runner.withdraw_speculative()
        self.config = config
        if config.frames is not None and not self.frames.on:
            self._buffer.clear()
        self.frames.configure(config, self._buffer.end_sample)
        if (detection := config.turn_detection) is None:
            self._turn_prefill.reset()
            self.transcripts.discard()
            self._stop_speech()
            self._detector = None
            self._next_item()
            self._idle.disarm()
            self._barge_in.withdraw()
            return
        self._barge_in.configure(detection)
        settings = self._judge.settings(detection)
        if self._detector is None:
            # Buffered audio may hold the start of a turn; it is scored with the next append.
            start, end = self._buffer.start_sample, self._buffer.end_sample
            self._detector = SpeechDetector(self.parts.scorer.model, settings, start_sample=start)
            self._detector.take(self._buffer.peek(start, end))
        self._detector.settings = settings

    async def hear(self, raw: bytes) -> None:
        """Take the next audio of the user, whole samples in the session's format.

        Raises:
            BufferFullError: the buffer is full, and only the client can empty it.
        """
        if isinstance(self.frames, DuplexMode):
            self.frames.hear(raw)
            return
        form = self.config.input_format
        if self._detector is None and not self.frames.on:
            self._buffer.check_room(int(form.duration_ms(len(raw)) * SAMPLES_PER_MS))
        slice_bytes = form.n_bytes(_SLICE_MS)
        with self._missing_audio.reading():
            for start in range(0, len(raw), slice_bytes):
                if start:
                    await asyncio.sleep(0)
                self._take(self._decoder.push(raw[start : start + slice_bytes]))
                await self._listen()
        if self._detector is not None and self._detector.speaking:
            self._missing_audio.heard(self._detector.settings.silence_duration_ms / 1000)
            self.monitor.speech_continues()

    def leave(self) -> None:
        """The client cannot send audio until come_back(): what is missing is not silence."""
        self._is_away = True
        self._missing_audio.stop()

    def come_back(self) -> None:
        self._is_away = False
        if self._detector is not None and self._detector.speaking:
            self._missing_audio.heard(self._detector.settings.silence_duration_ms / 1000)

    def commit(self) -> None:
        """End the turn at the client's request; the client creates the response, too.

        Raises:
            EmptyCommitError: less than 100 ms were sent since the last turn.
            NoTurnsError: in frame mode.
        """
        if self.frames.on:
            raise NoTurnsError
        self._buffer.check_commit(self._decoder.owed_samples)
        self._buffer.append(self._decoder.finish())
        self._turn_prefill.reset()  # its chunks begin with the speech, this turn with all the audio
        self._turn_runner.withdraw_speculative()
        if self._detector:
            self._stop_speech()
            self._reset(self._detector)
        begin = self._turn_start_ms * SAMPLES_PER_MS - self._buffer.start_sample
        audio = self._buffer.take(self._buffer.start_sample, self._buffer.end_sample)
        self._commit(audio, partial(has_speech, model=self.parts.scorer.model), begin=begin)

    def clear(self) -> None:
        self._buffer.append(self._decoder.finish())  # cleared audio still counts as time
        self._buffer.clear()
        self.frames.clear(self._buffer.end_sample)
        self._turn_runner.withdraw_speculative()
        self._turn_prefill.reset()
        self.transcripts.discard()
        if self._detector:
            self._stop_speech()
            self._reset(self._detector)
            self._next_item()
        self.port.audio_cleared()

    async def close(self) -> None:
        self._detector = None  # a pause that is still being judged must not end a turn
        # Responses that end with the session must not arm the idle timer again.
        self.responses.on_done = lambda unheard_s: None
        self._idle.disarm()
        self._missing_audio.stop()
        await close_all(self._judge.close, self._barge_in.close, self.frames.close)

    def _next_item(self) -> None:
        """Choose the item id of the next turn; speech_started names it before the item exists."""
        self._item_id = self.changes.conversation.promised_id = new_id("item")

    def _stop_speech(self) -> None:
        """Report the end of speech whose start was reported: a client waits for it."""
        if self._detector and self._detector.speaking:
            self._emit_stopped(self._detector.force_stop("client"))

    def _reset(self, detector: SpeechDetector) -> None:
        detector.reset(self._buffer.end_sample)
        self._barge_in.withdraw()

    def _take(self, pcm: np.ndarray) -> None:
        self._buffer.append(pcm)
        if isinstance(self.frames, FrameMode) and self.frames.on:
            self.frames.grow(self._buffer)
        elif self._detector is not None:
            self._detector.take(pcm)

    async def _listen(self) -> None:
        """Score the new audio and handle its events. The connection reads on after this returns,
        so that events keep the order of the audio."""
        while (detector := self._detector) is not None:
            detection = self.config.turn_detection
            assert detection is not None
            detector.confirming = detection.interrupt_response and self.responses.audible.any
            if (due := detector.due()) is None:
                break
            scores, state = await self.parts.scorer.score(*due)
            frame = Frame(
                buffer=self._buffer,
                end=detector.due_end,
                n_windows=len(scores),
                onset=detector.onset_sample,
                detection=detection,
                over_response=detector.confirming and not detector.speaking,
            )
            heard = await self._barge_in.hear(frame, scores)
            if detector is not self._detector:
                return  # the session has ended
            for event in detector.scored(heard.scores, state, heard.outlast_ms, heard.voice):
                self._on_speech(event)
        if detector is None:
            return
        if detector.speaking:
            start = self._turn_start_ms * SAMPLES_PER_MS
            self._judge.grow(detector.silence_ms)
            self._turn_prefill.grow(self.config, self._buffer, start, detector.silence_ms)
            clips = () if detection and detection.judges_turns else self._turn_prefill.final_clips
            self.transcripts.grow(self._item_id, clips, self.config.transcripts)
        self._bound(detector, detection.idle_timeout_ms if detection else None)

    def _bound(self, detector: SpeechDetector, idle_ms: int | None) -> None:
        """End a turn that is too long, and drop the silence before a turn."""
        begin = self._turn_start_ms * SAMPLES_PER_MS
        if detector.speaking and self._buffer.end_sample - begin > self._buffer.max_samples:
            log.warning("turn_too_long max_s=%g", self._limits.max_input_audio_s)
            self._on_stopped(detector.force_stop("too_long"))
        if not detector.speaking:
            begin = min(detector.earliest_turn, self._barge_in.needed_from)
        kept_ms = max(_KEPT_MS, idle_ms or 0) if self._idle.armed else _KEPT_MS
        n_dropped = self._buffer.keep(begin, kept_ms * SAMPLES_PER_MS)
        self._metrics.input_audio_dropped_s.inc(n_dropped / INPUT_RATE_HZ)

    def _on_speech(self, event: SpeechEvent) -> None:
        assert self.config.turn_detection is not None
        match event:
            case SpeechSuspected():
                self._barge_in.suspected(event, self.config.turn_detection)
            case SpeechDismissed():
                self._barge_in.dismissed(event, self.config)
            case SpeechStarted():
                self._on_started(event)
            case SpeechPaused():
                self._on_paused(event)
            case SpeechResumed():
                self._pause_ms = None
                self._turn_prefill.resume(event.silence_ms)
                self._turn_runner.withdraw_speculative()
            case SpeechStopped():
                self._on_stopped(event)

    def _on_words(self, dismissed: SpeechDismissed) -> None:
        """A short voice over a response takes the turn by its words."""
        if self._detector and (turn := self._detector.recall(dismissed)):
            started, stopped = turn
            self._on_started(started)
            self._on_stopped(stopped)

    def _on_started(self, event: SpeechStarted) -> None:
        detector, detection = self._detector, self.config.turn_detection
        assert detector is not None and detection is not None
        self._idle.disarm()
        self._turn_prefill.begin()
        # The padding may have been less when the silence before the turn was dropped.
        held_from_ms = -(-self._buffer.start_sample // SAMPLES_PER_MS)
        at_ms = max(event.at_ms, held_from_ms)
        self._turn_start_ms = at_ms
        self._pause_ms = None
        onset_s = self._buffer.arrived_s(event.onset_ms, self._clock.now_s())
        self.monitor.speech_started(onset_s)
        self._metrics.vad_events.labels("started").inc()
        self.port.speech_started(at_ms, self._item_id)
        self._barge_in.started(onset_s, detection)

    def _on_paused(self, pause: SpeechPaused) -> None:
        detector, detection = self._detector, self.config.turn_detection
        assert detector is not None and detection is not None
        start, end = self._turn_start_ms * SAMPLES_PER_MS, pause.at_ms * SAMPLES_PER_MS
        self._turn_prefill.pause(self.config, self._buffer, start, end)
        utterance = self._turn_prefill.so_far(AudioPart(self._buffer.peek(start, end)))
        if speculates(detection, self._settings):
            self._pause_ms = pause.at_ms
            self._turn_runner.speculate(self.config, utterance)
        self._judge.begin(pause, detector, start, utterance, self.config)

    def _on_stopped(self, event: SpeechStopped) -> None:
        detection = self.config.turn_detection
        assert detection is not None
        self._emit_stopped(event)
        start, end = self._turn_start_ms * SAMPLES_PER_MS, event.at_ms * SAMPLES_PER_MS
        audio = self._buffer.take(start, end)
        checks = self._barge_in.turn_checks()
        if detection.takes_noise:
            checks.insert(0, partial(has_speech, model=self.parts.scorer.model))
        is_speech = partial(_fulfils, checks=checks) if checks else None
        self._barge_in.learn(audio.pcm, event.at_ms - event.speech_end_ms)
        utterance = None
        if self._pause_ms is not None:
            # As a speculative turn hears it, whether or not there is one.
            heard = AudioPart(audio.pcm[: self._pause_ms * SAMPLES_PER_MS - start])
            utterance = self._turn_runner.speculated or self._turn_prefill.so_far(heard)
        self._commit(audio, is_speech, utterance)
        if detection.create_response:
            self._respond(event.speech_end_ms)

    def _emit_stopped(self, event: SpeechStopped) -> None:
        self._metrics.vad_events.labels("stopped").inc()
        self.monitor.speech_stopped(event.reason)
        self.port.speech_stopped(event.at_ms, self._item_id)

    def _commit(
        self,
        audio: AudioPart,
        is_speech: Callable[[np.ndarray], bool] | None = None,
        utterance: Utterance | None = None,
        begin: int = 0,
    ) -> None:
        """is_speech: judged before a response to the turn; None: the turn counts as speech.
        utterance: what the model hears; None: all of it.
        begin: sample of the audio at which the speech begins, if the user still speaks."""
        self._idle.disarm()
        self.monitor.turn_committed()
        content = [AudioContent(audio)]
        if utterance is None:
            utterance = self._turn_prefill.finish(audio)
        self._turn_prefill.reset()
        item = MessageItem(self._item_id, "user", content, utterance, is_speech)
        self._next_item()
        previous_id = self.changes.conversation.last_id
        self.port.turn_committed(item.id, previous_id, audio.duration_s * 1000)
        self.changes.add(item)
        heard = utterance if self._settings.prefills_at_pauses and is_speech is None else ()
        self.transcripts.add(item, audio, self.config.transcripts, heard, begin)

    def _respond(self, speech_end_ms: int | None = None) -> None:
        now_s = self._clock.now_s()
        end_s = None if speech_end_ms is None else self._buffer.arrived_s(speech_end_ms, now_s)
        plan = ResponsePlan(config=self.config, decided_at_s=now_s, speech_end_at_s=end_s)
        self.responses.create_when_idle(plan)

    def _on_response_done(self, unheard_s: float) -> None:
        if (detection := self.config.turn_detection) and detection.idle_timeout_ms is not None:
            self._idle.arm(unheard_s + detection.idle_timeout_ms / 1000)

    def _on_missing_audio(self) -> None:
        if self._detector is not None and self._detector.speaking:
            self._on_stopped(self._detector.force_stop("no_audio"))

    def _on_idle(self) -> None:
        detection = self.config.turn_detection
        speaks = self._detector is not None and self._detector.speaking
        if detection is None or detection.idle_timeout_ms is None or self.responses.busy or speaks:
            return
        if self._is_away:
            return self._idle.arm(detection.idle_timeout_ms / 1000)
        end = self._buffer.end_sample
        start = max(self._buffer.start_sample, end - detection.idle_timeout_ms * SAMPLES_PER_MS)
        self.port.user_is_idle(start // SAMPLES_PER_MS, end // SAMPLES_PER_MS, self._item_id)
        self._commit(self._buffer.take(start, end))
        self._respond()


def _fulfils(pcm: np.ndarray, checks: Sequence[Callable[[np.ndarray], bool]]) -> bool:
    return all(check(pcm) for check in checks)
