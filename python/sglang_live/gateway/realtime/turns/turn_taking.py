"""The caller's side of turn taking: audio in, turns out.

In: input_audio_buffer.* events. Out: committed items, answers asked for, answers interrupted.
Owner: one TurnTaking per connection. Time is audio received (see interaction/vad.py).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sglang_live.clock import Clock
from sglang_live.core import INPUT_RATE_HZ, AudioPart
from sglang_live.gateway.audio.codec import WireDecoder, decode_base64
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.idle_timer import IdleTimer
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.realtime.conversation.events import ConversationEvents
from sglang_live.gateway.realtime.conversation.items import AudioContent, MessageItem
from sglang_live.gateway.realtime.events import AudioAppend
from sglang_live.gateway.realtime.outbox import Emit
from sglang_live.gateway.realtime.responses.plan import ResponsePlan
from sglang_live.gateway.realtime.responses.responses import Responses
from sglang_live.gateway.realtime.session_config import SessionConfig
from sglang_live.gateway.realtime.turn_detection import TurnDetection
from sglang_live.gateway.realtime.turns.endpointing import Endpointing, settings_of
from sglang_live.gateway.realtime.turns.input_transcription import InputTranscription
from sglang_live.gateway.realtime.turns.turn_prefill import Pieces, UtterancePieces
from sglang_live.interaction.barge_in import BargeIn
from sglang_live.interaction.endpoint import HEARD_SAMPLES
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.presence import has_speech
from sglang_live.interaction.scoring import SpeechScorer
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
    VadSettings,
)
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_USUAL_THRESHOLD = VadSettings().threshold
# A long append is worked off in pieces, so that other callers and the own answer go on.
_PIECE_MS = 1000


@dataclass(eq=False)
class TurnTaking:
    """
    config: the session's settings; replaced by configure().
    endpointing: for semantic_vad; None: silence alone ends turns.
    """

    config: SessionConfig
    gateway: GatewayConfig
    items: ConversationEvents
    responses: Responses
    transcripts: InputTranscription
    monitor: SessionMonitor
    emit: Emit
    scorer: SpeechScorer
    endpointing: Endpointing | None
    clock: Clock
    metrics: GatewayMetrics

    def __post_init__(self):
        self._buffer = InputBuffer(self.gateway.max_input_audio_s)
        self._decoder = WireDecoder(self.config.input_format)
        self._detector: SpeechDetector | None = None
        self._next_item()
        self._turn_start_ms = 0
        self._pieces = UtterancePieces(self.gateway.turn_prefill_s, self._prefill_turn)
        self._frames = self.responses.frame_turns(self.emit, lambda: self.config)
        self._idle = IdleTimer(self.clock, self._on_idle)
        self._barge_in = BargeIn(self.responses, self.monitor, self.clock, self.metrics)
        self.responses.on_done = self._on_response_done
        self.configure(self.config)

    def configure(self, config: SessionConfig) -> None:
        """Follow the session's settings, from the next sample on."""
        if config.input_format != self._decoder.form:
            self._take(self._decoder.finish())
            self._decoder = WireDecoder(config.input_format)
        if config != self.config:
            self.responses.withdraw_speculative()
        self.config = config
        if config.frames is not None and not self._frames.on:
            self._buffer.clear()
        self._frames.configure(config.frames, self._buffer.end_sample)
        if config.turn_detection is None:
            self._pieces.forget()
            self._hear_no_more()
            self._detector = None
            self._next_item()
            self._idle.disarm()
            self._barge_in.withdraw()
        elif self._detector is None:
            settings = self._vad_settings(config.turn_detection)
            # What waits in the buffer is judged with the next append: it may hold a turn's start.
            start, end = self._buffer.start_sample, self._buffer.end_sample
            self._detector = SpeechDetector(self.scorer.model, settings, start_sample=start)
            self._detector.take(self._buffer.peek(start, end))
        else:
            self._detector.settings = self._vad_settings(config.turn_detection)

    def _vad_settings(self, detection: TurnDetection) -> VadSettings:
        if detection.kind == "semantic_vad" and self.endpointing is not None:
            return settings_of(detection)
        speculative_turns = detection.kind == "server_vad" and detection.create_response
        return replace(
            detection.vad, pause_ms=self.gateway.speculate_ms if speculative_turns else None
        )

    async def append(self, event: AudioAppend) -> None:
        """Raises ClientEventError, or BufferFullError when nothing else would free the buffer."""
        form = self.config.input_format
        max_bytes = self.gateway.max_append_bytes
        raw = decode_base64(event.audio, form, max_bytes=max_bytes, param="audio")
        if self._detector is None and not self._frames.on:
            self._buffer.check_room(int(form.duration_ms(len(raw)) * SAMPLES_PER_MS))
        piece_bytes = form.n_bytes(_PIECE_MS)
        for start in range(0, len(raw), piece_bytes):
            if start:
                await asyncio.sleep(0)
            self._take(self._decoder.push(raw[start : start + piece_bytes]))
            await self._listen()

    def commit(self) -> None:
        """End the turn because the client says so; the answer is the client's to ask for.

        Raises:
            EmptyCommitError: less than 100 ms were sent since the last turn.
            ClientEventError: there are no turns in frame mode.
        """
        if self._frames.on:
            raise ClientEventError(
                "There are no turns in frame mode: every frame is taken in by itself.",
                code="frame_mode",
                param="type",
            )
        self._buffer.check_commit(self._decoder.owed_samples)
        self._buffer.append(self._decoder.finish())
        self._pieces.forget()  # this turn has all that was sent, not only what is speech
        self.responses.withdraw_speculative()
        if self._detector:
            self._hear_no_more()
            self._reset(self._detector)
        audio = self._buffer.take(self._buffer.start_sample, self._buffer.end_sample)
        self._commit(audio, is_speech=partial(has_speech, audio.pcm, self.scorer.model))

    def clear(self) -> None:
        self._buffer.append(self._decoder.finish())  # the cleared audio still counts as time
        self._buffer.clear()
        self._frames.clear(self._buffer.end_sample)
        self.responses.withdraw_speculative()
        self._pieces.forget()
        if self._detector:
            self._hear_no_more()
            self._reset(self._detector)
            self._next_item()
        self.emit("input_audio_buffer.cleared")

    async def close(self) -> None:
        self._detector = None  # a pause that is still being judged ends no turn any more
        # Answers that end because the call does must not arm it again.
        self.responses.on_done = lambda playout_left_s: None
        self._idle.disarm()
        self._barge_in.withdraw()
        await self._frames.close()

    def _next_item(self) -> None:
        """Of the turn that comes next; clients hear of its id when it begins to be spoken."""
        self._item_id = self.items.conversation.promised_id = new_id("item")

    def _hear_no_more(self) -> None:
        """The client heard of a start; without a stop it would wait for one for ever."""
        if self._detector and self._detector.speaking:
            self._emit_stopped(self._detector.force_stop())

    def _reset(self, detector: SpeechDetector) -> None:
        detector.reset(self._buffer.end_sample)
        self._barge_in.withdraw()

    def _take(self, pcm: np.ndarray) -> None:
        self._buffer.append(pcm)
        if self._frames.on:
            self._frames.grow(self._buffer)
        elif self._detector is not None:
            self._detector.take(pcm)

    async def _listen(self) -> None:
        """What the audio that was taken says. Audio and all that it brings about keep their order:
        the connection reads on when this is done."""
        while (detector := self._detector) is not None:
            detection = self.config.turn_detection
            assert detection is not None
            detector.confirming = detection.interrupt_response and self.responses.audible
            if (due := detector.due()) is None:
                break
            scored = await self.scorer.score(*due)
            if detector is not self._detector:
                return  # the call has ended
            for event in detector.scored(*scored):
                self._on_speech(event)
        if detector is None:
            return
        if detector.speaking:
            self._pieces.grow(self._buffer, self._turn_start_ms * SAMPLES_PER_MS)
        if self._buffer.excess_samples:
            self._shed()

    def _prefill_turn(self, pieces: Pieces) -> bool:
        return self.responses.prefill_turn(self.config, pieces)

    def _shed(self) -> None:
        assert self._detector is not None
        if self._detector.speaking:
            log.warning("turn_too_long max_s=%g", self.gateway.max_input_audio_s)
            self._on_stopped(self._detector.force_stop())
        excess = self._buffer.excess_samples
        self._buffer.discard_before(self._buffer.start_sample + excess)
        self.metrics.input_audio_dropped_s.inc(excess / INPUT_RATE_HZ)

    def _on_speech(self, event: SpeechEvent) -> None:
        assert self.config.turn_detection is not None
        match event:
            case SpeechSuspected():
                confirm_ms = self.config.turn_detection.vad.confirm_ms
                self._barge_in.suspect(self._at_s(event.onset_ms), confirm_ms)
            case SpeechDismissed():
                self._barge_in.dismiss()
            case SpeechStarted():
                self._on_started(event)
            case SpeechPaused():
                self._on_paused(event)
            case SpeechResumed():
                self.responses.withdraw_speculative()
            case SpeechStopped():
                self._on_stopped(event)

    def _at_s(self, audio_ms: float) -> float:
        """When the caller's audio was at this position, on the gateway's clock."""
        since_ms = self._buffer.end_sample / SAMPLES_PER_MS - audio_ms
        return self.clock.now_s() - since_ms / 1000

    def _on_started(self, event: SpeechStarted) -> None:
        assert self.config.turn_detection is not None
        self._idle.disarm()
        self._pieces.forget()
        self._turn_start_ms = event.at_ms
        onset_s = self._at_s(event.onset_ms)
        self.monitor.speech_started(onset_s)
        self.metrics.vad_events.labels("started").inc()
        self.emit(
            "input_audio_buffer.speech_started",
            audio_start_ms=event.at_ms,
            item_id=self._item_id,
        )
        if self.config.turn_detection.interrupt_response:
            self._barge_in.interrupt(onset_s)
        else:
            self._barge_in.withdraw()

    def _on_paused(self, pause: SpeechPaused) -> None:
        detector, detection = self._detector, self.config.turn_detection
        assert detector is not None and detection is not None
        if detection.kind == "server_vad":
            self._speculative(pause)
            return
        assert self.endpointing is not None
        until = pause.at_ms * SAMPLES_PER_MS
        begun = max(self._turn_start_ms * SAMPLES_PER_MS, until - HEARD_SAMPLES)
        said = self._buffer.peek(begun, until)

        def end() -> None:
            if self._detector is detector and (stopped := detector.stop_at(pause)):
                self._on_stopped(stopped)

        self.endpointing.ask(said, detection, lambda: detector.is_in(pause), end)

    def _speculative(self, pause: SpeechPaused) -> None:
        """An answer to what was said so far is begun; if the silence lasts, it is half done."""
        start, end = self._turn_start_ms * SAMPLES_PER_MS, pause.at_ms * SAMPLES_PER_MS
        said = self._pieces.so_far(AudioPart(self._buffer.peek(start, end)))
        self.responses.speculate(self.config, said)

    def _on_stopped(self, event: SpeechStopped) -> None:
        assert self.config.turn_detection is not None
        self._emit_stopped(event)
        start, end = self._turn_start_ms * SAMPLES_PER_MS, event.at_ms * SAMPLES_PER_MS
        audio, is_speech = self._buffer.take(start, end), None
        # Below the usual threshold the detector takes noise for speech.
        if self.config.turn_detection.vad.threshold < _USUAL_THRESHOLD:
            is_speech = partial(has_speech, audio.pcm, self.scorer.model)
        self._commit(audio, is_speech)
        if self.config.turn_detection.create_response:
            self._answer(event.speech_end_ms)

    def _emit_stopped(self, event: SpeechStopped) -> None:
        self.metrics.vad_events.labels("stopped").inc()
        self.monitor.speech_stopped()
        self.emit(
            "input_audio_buffer.speech_stopped", audio_end_ms=event.at_ms, item_id=self._item_id
        )

    def _commit(self, audio: AudioPart, is_speech: Callable[[], bool] | None = None) -> None:
        """is_speech: to be asked before it is answered; None: no question."""
        self._idle.disarm()
        self.monitor.turn_committed()
        content = [AudioContent(audio.pcm)]
        # What an answer was begun to is what the model has heard: all but the last silence.
        pieces = self.responses.speculated or self._pieces.whole(audio)
        self._pieces.forget()
        item = MessageItem(self._item_id, "user", content, pieces, is_speech)
        self._next_item()
        previous = self.items.conversation.last_id
        self.emit("input_audio_buffer.committed", previous_item_id=previous, item_id=item.id)
        self.items.add(item)
        if self.config.transcription is not None:
            self.transcripts.ask(item, audio, self.config.transcription)

    def _answer(self, speech_end_ms: int | None = None) -> None:
        plan = ResponsePlan(
            config=self.config,
            decided_at_s=self.clock.now_s(),
            speech_end_at_s=None if speech_end_ms is None else self._at_s(speech_end_ms),
        )
        self.responses.create_when_idle(plan)

    def _on_response_done(self, playout_left_s: float) -> None:
        detection = self.config.turn_detection
        if detection and detection.idle_timeout_ms is not None:
            self._idle.arm(playout_left_s + detection.idle_timeout_ms / 1000)

    def _on_idle(self) -> None:
        detection = self.config.turn_detection
        if detection is None or detection.idle_timeout_ms is None or self.responses.busy:
            return
        if self._detector and self._detector.speaking:
            return
        end = self._buffer.end_sample
        start = max(self._buffer.start_sample, end - detection.idle_timeout_ms * SAMPLES_PER_MS)
        self.emit(
            "input_audio_buffer.timeout_triggered",
            audio_start_ms=start // SAMPLES_PER_MS,
            audio_end_ms=end // SAMPLES_PER_MS,
            item_id=self._item_id,
        )
        self._commit(self._buffer.take(start, end))
        self._answer()
