"""Frames of a call with a model that hears while it speaks, whatever the protocol.

In: the user's audio as it comes. Out: frames of the model's length; counts of what became of them.
Owner: one CallFrames per connection.
"""

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.gateway.audio.codec import WireFormat, to_linear
from sglang_live.gateway.audio.resampler import StreamResampler
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.model import known_voice
from sglang_live.gateway.parts import GatewayParts
from sglang_live.orchestrator.duplex import DuplexCall, SpokenFrame
from sglang_live.orchestrator.sessions import VoiceSession

# Speech that counts as one response against limits, about.
ROLL_S = 30.0
WHY = "This model hears and speaks at the same time"


class CallFrames:
    """
    Attributes:
        frame_s: of a frame.
    """

    def __init__(self, session: VoiceSession, parts: GatewayParts):
        self._session, self._parts = session, parts
        self.frame_s = parts.orchestrator.duplex_s
        self._frame_bytes = 2 * round(self.frame_s * OUTPUT_RATE_HZ)
        self.silence = bytes(self._frame_bytes)
        self._resampler: StreamResampler | None = None
        self._form: WireFormat | None = None
        self._pcm = bytearray()
        self._n_missing = 0  # that were counted

    def begin(self, config: SessionConfig) -> DuplexCall:
        """The call; it begins with its run()."""
        return self._session.duplex(
            voice=known_voice(self._parts.orchestrator.voices, config.voice),
            role=config.instructions,
            temperature=config.temperature,
            window_frames=_window_frames(config),
        )

    def push(self, raw: bytes, form: WireFormat) -> list[bytes]:
        """Frames that are complete with the user's next audio, whole samples in this format."""
        if self._resampler is None or form != self._form:
            self._form, self._resampler = form, StreamResampler(form.rate_hz, OUTPUT_RATE_HZ)
        self._pcm += self._resampler.push(to_linear(raw, form)).astype("<i2").tobytes()
        frames, n = [], self._frame_bytes
        while len(self._pcm) >= n:
            frames.append(bytes(self._pcm[:n]))
            del self._pcm[:n]
        return frames

    def clear(self) -> None:
        """Drop the audio of the incomplete frame."""
        self._pcm.clear()

    def hear(self, call: DuplexCall, frame: bytes) -> bool:
        """Returns False if it is dropped."""
        is_heard = call.hear(frame)
        if not is_heard:
            self._parts.metrics.frames.labels("dropped").inc()
        return is_heard

    def count(self, call: DuplexCall, frame: SpokenFrame) -> tuple[str, int]:
        """The frame's outcome, and how many of the user's frames were silence instead since the
        last one."""
        metrics, latency_s = self._parts.metrics, frame.latency_s
        outcome = "late" if latency_s is not None and latency_s > self.frame_s else "on_time"
        metrics.frames.labels(outcome).inc()
        n_missing, self._n_missing = call.n_missing - self._n_missing, call.n_missing
        metrics.frames_missing.inc(n_missing)
        if latency_s is not None:
            metrics.frame_latency_s.observe(latency_s)
        return outcome, n_missing


def _window_frames(config: SessionConfig) -> int | None:
    kept = config.truncation.retention
    if kept is None:
        return None
    return min(kept.window_tokens, kept.window_frames or kept.window_tokens)
