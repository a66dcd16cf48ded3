"""Fades at the joints of pieces of speech, against clicks.

In and out: int16 little-endian at OUTPUT_RATE_HZ. Owner: one Fades per piece.
"""

import numpy as np

from sglang_live.core import OUTPUT_RATE_HZ

# 5 ms: long enough to remove a click, shorter than a phoneme.
_RAMP_SAMPLES = OUTPUT_RATE_HZ // 200
_RAMP_BYTES = 2 * _RAMP_SAMPLES


class Fades:
    """Fades of one piece. fades_in, fades_out: whether another piece comes before it, after it."""

    def __init__(self, *, fades_in: bool, fades_out: bool):
        self._fades_in, self._fades_out = fades_in, fades_out
        self._held = b""

    def push(self, pcm: bytes) -> bytes:
        """Returns the audio that is ready. A piece that fades out keeps 5 ms until finish()."""
        self._held += pcm
        if self._fades_in:
            if len(self._held) < _RAMP_BYTES:
                return b""
            self._fade_in()
        n_ready = len(self._held) - (_RAMP_BYTES if self._fades_out else 0)
        ready, self._held = self._held[: max(0, n_ready)], self._held[max(0, n_ready) :]
        return ready

    def finish(self) -> bytes:
        if self._fades_in:
            self._fade_in()
        rest, self._held = self._held, b""
        return _ramped(rest, up=False) if self._fades_out else rest

    def _fade_in(self) -> None:
        self._fades_in = False
        self._held = _ramped(self._held[:_RAMP_BYTES], up=True) + self._held[_RAMP_BYTES:]


def _ramped(pcm: bytes, *, up: bool) -> bytes:
    samples = np.frombuffer(pcm, "<i2")
    gains = np.linspace(0.0, 1.0, len(samples))
    return np.rint(samples * (gains if up else gains[::-1])).astype("<i2").tobytes()
