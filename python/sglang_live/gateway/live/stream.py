"""What a Live session sends at the pace of time.

In: ticks, what the voice says and reports, fixtures, acknowledgements that are due. Out: server
events; 100 ms of audio for each tick, exact zeros in silence, or nothing on a track.
Owner: one Stream per session. Its time is the ticks since session.started, in milliseconds.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import WireEncoder, WireFormat, encode_base64
from sglang_live.gateway.errors import ClientEventError, error_body
from sglang_live.gateway.live.broadcast import Broadcast
from sglang_live.gateway.live.voice import TICK_MS, Voice
from sglang_live.gateway.live.work import Worker
from sglang_live.gateway.webrtc.sound import Track
from sglang_live.telemetry.metrics import GatewayMetrics

# Fragments of transcripts end at multiples of it, and so do acknowledged appends.
_FRAGMENT_MS = 200
_USAGE_EVERY_MS = 15_000


def echo(event_id: str | None) -> dict[str, Any]:
    """The id of the client's event, if it has one."""
    return {} if event_id is None else {"client_event_id": event_id}


def error_fields(error: LiveError, event_id: str | None) -> dict[str, Any]:
    """The fields of an `error` event."""
    body = {name: value for name, value in error_body(error).items() if value is not None}
    return {"error": {**body, **echo(event_id)}, **echo(event_id)}


@dataclass(frozen=True, slots=True)
class _Append:
    """An append whose acknowledgement is due at end_ms."""

    kind: str
    event_id: str | None
    start_ms: int
    end_ms: int


@dataclass(slots=True)
class _Fixture:
    audio: bytes
    event_id: str | None


class Stream:
    """
    voice: to be set before the first tick.
    worker: does the work that is delegated; None: the application does.
    """

    voice: Voice
    worker: Worker | None = None

    def __init__(
        self,
        outbox: Broadcast,
        form: WireFormat,
        metrics: GatewayMetrics,
        track: Track | None = None,
    ):
        """track: carries the audio; None: it is events."""
        self._outbox = outbox
        self._track = track
        self._form = form
        self._metrics = metrics
        self._tick_bytes = form.n_bytes(TICK_MS)
        silence = form.silence * (self._tick_bytes // len(form.silence))
        self._silence = encode_base64(silence)
        self.now_ms = 0
        self._said = ""
        self._said_from_ms = 0
        self._heard_until_ms = 0
        self._appends: deque[_Append] = deque()
        self._fixture: _Fixture | None = None
        self._is_over = False

    @property
    def plays_fixture(self) -> bool:
        return self._fixture is not None

    @property
    def usage(self) -> dict[str, float]:
        return {"seconds": self.now_ms / 1000}

    def tick(self) -> None:
        """Send the next 100 ms."""
        begin_ms = self.now_ms
        self.now_ms = begin_ms + TICK_MS
        if self._fixture is not None:
            self._play(self._fixture)
        else:
            spoken = self.voice.take(self._tick_bytes)
            self._emit_audio(None if spoken.is_silence else spoken.audio, spoken.on_sent)
            if spoken.text and not self._said:
                self._said_from_ms = begin_ms
            self._said += spoken.text
        if self.now_ms % _FRAGMENT_MS == 0:
            self._tell_said()
        while self._appends and self._appends[0].end_ms <= self.now_ms:
            append = self._appends.popleft()
            self._outbox.emit(
                f"session.{append.kind}.appended",
                start_ms=append.start_ms,
                end_ms=append.end_ms,
                **echo(append.event_id),
            )
        if self.now_ms % _USAGE_EVERY_MS == 0:
            self._outbox.emit("session.usage.updated", usage=self.usage)

    def play(self, pcm: bytes, event_id: str | None) -> None:
        """Play a fixture in place of the voice.

        Args:
            pcm: int16 at 24 kHz.
        """
        assert self._fixture is None
        encoder = WireEncoder(self._form)
        audio = b"".join((*encoder.push(pcm), *encoder.finish()))
        self._fixture = _Fixture(audio, event_id)
        self._outbox.emit("session.output_audio.fixture.playing", **echo(event_id))

    def acknowledge(self, kind: str, event_id: str | None) -> None:
        """Report an append when the fragment of time in which it came is over."""
        start_ms = self.now_ms
        end_ms = start_ms + _FRAGMENT_MS - start_ms % _FRAGMENT_MS
        self._appends.append(_Append(kind, event_id, start_ms, end_ms))

    def end(self) -> None:
        """The session closes: report words that were said, and appends that came too late."""
        self._is_over = True
        self._tell_said()
        self._fixture = None
        for append in self._appends:
            error = ClientEventError(
                "The session closed before this was in its context.",
                code="context_injection_incomplete",
            )
            self._metrics.errors.labels(error.code).inc()
            self._outbox.emit("error", **error_fields(error, append.event_id))
        self._appends.clear()

    # --- what the voice reports ---

    def user_said(self, text: str, start_ms: float, end_ms: float) -> None:
        if self._is_over:
            return
        begin = max(int(start_ms), self._heard_until_ms)
        self._heard_until_ms = max(int(end_ms), begin)
        self._outbox.emit(
            "session.input_transcript.delta",
            delta=text,
            start_ms=begin,
            end_ms=self._heard_until_ms,
        )

    def delegated(self, delegation_id: str) -> None:
        if self._is_over:
            return
        delegation = {"id": delegation_id, "type": "delegation", "target": "client"}
        if self.worker is not None:
            delegation |= self.worker.delegate(delegation_id)
        self._outbox.emit(
            "session.delegation.created", delegation=delegation, offset_ms=self.now_ms
        )

    def voice_failed(self, error: LiveError) -> None:
        if self._is_over:
            return
        self._metrics.errors.labels(error.code).inc()
        self._outbox.emit("error", **error_fields(error, None))

    def _emit_audio(self, audio: bytes | None, on_sent: Callable[[], None] | None = None) -> None:
        """The audio of the tick that ends now; None: silence."""
        kind = "session.output_audio.delta"
        delta = self._silence if audio is None else encode_base64(audio)
        times = {"start_ms": self.now_ms - TICK_MS, "end_ms": self.now_ms}
        if self._track is None:
            self._outbox.emit(kind, on_sent=on_sent, numbered=False, aside=times, delta=delta)
            return
        if audio is None:
            self._track.pause()
        else:
            self._track.play(audio)
        self._outbox.emit_aside(kind, delta=delta, **times)
        if on_sent is not None:
            on_sent()

    def _tell_said(self) -> None:
        if self._said:
            self._outbox.emit(
                "session.output_transcript.delta",
                delta=self._said,
                start_ms=self._said_from_ms,
                end_ms=self.now_ms,
            )
            self._said = ""

    def _play(self, fixture: _Fixture) -> None:
        piece, fixture.audio = fixture.audio[: self._tick_bytes], fixture.audio[self._tick_bytes :]
        silence = self._form.silence
        piece += silence * ((self._tick_bytes - len(piece)) // len(silence))
        self._emit_audio(piece)
        if not fixture.audio:
            self._fixture = None
            self._outbox.emit("session.output_audio.fixture.played", **echo(fixture.event_id))
