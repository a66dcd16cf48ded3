"""Codec between audio on the wire and inside the server.

The wire has base64 of PCM16 at 24 kHz or of G.711 at 8 kHz.
In: bytes of one append, or 24 kHz PCM from the vocoder. Out: int16 at 16 kHz, or wire frames.
Owner: one WireDecoder per session, one WireEncoder per response.
"""

import binascii
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pybase64

from sglang_live.core import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from sglang_live.gateway.audio.resampler import StreamResampler, resample
from sglang_live.gateway.errors import ClientEventError
from sglang_live.sound import g711

# In shorter frames the envelope is longer than the audio. Longer ones delay playback, and a frame
# must stay far below 1 MiB, the limit of some clients.
MIN_FRAME_MS = 20
MAX_FRAME_MS = 200


@dataclass(frozen=True, slots=True)
class WireFormat:
    kind: Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
    rate_hz: int
    sample_bytes: int

    def to_json(self) -> dict[str, str | int]:
        # Only PCM has a rate in the protocol's types; G.711 is 8 kHz by definition.
        if self.kind == "audio/pcm":
            return {"type": self.kind, "rate": self.rate_hz}
        return {"type": self.kind}

    def duration_ms(self, n_bytes: int) -> float:
        return n_bytes * 1000 / (self.rate_hz * self.sample_bytes)

    @property
    def silence(self) -> bytes:
        """One sample of it."""
        return _SILENCE[self.kind]

    def n_bytes(self, duration_ms: float) -> int:
        """Bytes of duration_ms, in whole samples."""
        return int(duration_ms * self.rate_hz / 1000) * self.sample_bytes


_SILENCE = {"audio/pcm": bytes(2), "audio/pcmu": b"\xff", "audio/pcma": b"\xd5"}
PCM = WireFormat("audio/pcm", OUTPUT_RATE_HZ, 2)
PCM_16K = WireFormat("audio/pcm", INPUT_RATE_HZ, 2)
PCMU = WireFormat("audio/pcmu", 8_000, 1)
PCMA = WireFormat("audio/pcma", 8_000, 1)
FORMATS: dict[str, WireFormat] = {form.kind: form for form in (PCM, PCMU, PCMA)}


def decode_base64(text: str, form: WireFormat, *, max_bytes: int, param: str) -> bytes:
    """Decode the audio of one event.

    Raises:
        ClientEventError: not strict base64, more than max_bytes, or half a sample.
    """
    try:
        raw = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):  # ValueError: characters outside ASCII
        raise ClientEventError("Invalid base64 audio.", param=param) from None
    if len(raw) > max_bytes:
        raise ClientEventError(
            f"Audio too long: {len(raw)} bytes, at most {max_bytes} per event.",
            code="audio_too_large",
            param=param,
        )
    if len(raw) % form.sample_bytes:
        # Half a sample would turn all later audio into noise.
        raise ClientEventError(
            f"PCM16 audio needs an even number of bytes per event, got {len(raw)}.", param=param
        )
    return raw


def encode_base64(raw: bytes) -> str:
    return pybase64.b64encode_as_string(raw)


class WireDecoder:
    """Decoder from bytes of one wire format to int16 at a rate."""

    def __init__(self, form: WireFormat, rate_hz: int = INPUT_RATE_HZ):
        self.form = form
        self._resampler = StreamResampler(form.rate_hz, rate_hz)

    @property
    def owed_samples(self) -> int:
        """Samples received but still inside the resampler."""
        return self._resampler.owed_samples

    def push(self, raw: bytes) -> np.ndarray:
        """raw: whole samples. Returns [n] int16."""
        return self._resampler.push(to_linear(raw, self.form))

    def finish(self) -> np.ndarray:
        return self._resampler.finish()


class WireEncoder:
    """Encoder from 24 kHz PCM to frames of one wire format, MIN_FRAME_MS to MAX_FRAME_MS long."""

    def __init__(self, form: WireFormat):
        self.form = form
        self._resampler = StreamResampler(OUTPUT_RATE_HZ, form.rate_hz)
        self._pending = bytearray()

    def push(self, pcm: bytes) -> list[bytes]:
        """pcm: int16 little-endian at OUTPUT_RATE_HZ, whole samples."""
        linear = np.frombuffer(pcm, "<i2").astype(np.int16, copy=False)
        self._pending += _from_linear(self._resampler.push(linear), self.form)
        return self._cut(self.form.n_bytes(MIN_FRAME_MS))

    def finish(self) -> list[bytes]:
        """The rest of the audio; its last frame may be shorter than MIN_FRAME_MS."""
        self._pending += _from_linear(self._resampler.finish(), self.form)
        return self._cut(1)

    def _cut(self, min_bytes: int) -> list[bytes]:
        frames = []
        max_bytes = self.form.n_bytes(MAX_FRAME_MS)
        while len(self._pending) >= min_bytes:
            frames.append(bytes(self._pending[:max_bytes]))
            del self._pending[:max_bytes]
        return frames


def decode_clip(raw: bytes, form: WireFormat) -> np.ndarray:
    """Decode a whole clip to [n] int16 at INPUT_RATE_HZ."""
    return resample(to_linear(raw, form), form.rate_hz, INPUT_RATE_HZ)


def encode_clip(pcm: np.ndarray, form: WireFormat) -> bytes:
    """Encode a whole clip. pcm: [n] int16 at INPUT_RATE_HZ."""
    return _from_linear(resample(pcm, INPUT_RATE_HZ, form.rate_hz), form)


def to_linear(raw: bytes, form: WireFormat) -> np.ndarray:
    """[n] int16, at the rate of the format."""
    if form.kind == "audio/pcm":
        return np.frombuffer(raw, "<i2").astype(np.int16, copy=False)
    codes = np.frombuffer(raw, np.uint8)
    return g711.mulaw_decode(codes) if form.kind == "audio/pcmu" else g711.alaw_decode(codes)


def _from_linear(pcm: np.ndarray, form: WireFormat) -> bytes:
    if form.kind == "audio/pcm":
        return pcm.astype("<i2", copy=False).tobytes()
    encode = g711.mulaw_encode if form.kind == "audio/pcmu" else g711.alaw_encode
    return encode(pcm).tobytes()
