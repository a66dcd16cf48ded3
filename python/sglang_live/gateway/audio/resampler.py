"""Streaming resampler with a few milliseconds of delay.

In: int16 mono audio in pieces of any length. Out: the same at another rate.
Owner: one StreamResampler per direction and session.
soxr's stream delays audio by up to 37 ms (24 to 16 kHz) or 115 ms (8 to 16 kHz), which would be
added to the time until the user hears a response.
"""

from functools import lru_cache
from math import gcd

import numpy as np
import soxr

# Zero crossings on each side of the filter's centre: more give a sharper filter and more delay.
_ZERO_CROSSINGS = 24
_KAISER_BETA = 8.0  # about 80 dB in the stop band
# Cutoff as a fraction of the lower Nyquist frequency; the rest is the transition band.
_CUTOFF = 0.92
# Output is computed in blocks of 16 or 1 periods of the filters' pattern. The inputs of a block are
# copied, so a long block is cheaper per sample; single periods for the rest add no delay. Pieces of
# 10 ms are whole blocks of 16.
_PERIODS = (16, 1)
_NOTHING = np.zeros(0)


class StreamResampler:
    _input: np.ndarray

    def __init__(self, rate_in_hz: int, rate_out_hz: int):
        divisor = gcd(rate_in_hz, rate_out_hz)
        self._up = rate_out_hz // divisor
        self._down = rate_in_hz // divisor
        self._passes = self._up == self._down
        # By block: input samples until the next block, and taps [n_taps, n] from n_taps inputs to
        # n outputs. The first output is at input `reach - 1` of the block.
        self._blocks = [(n * self._down, _block_taps(self._up, self._down, n)) for n in _PERIODS]
        self._reach = _reach(self._up, self._down)
        self._start()

    @property
    def owed_samples(self) -> int:
        """Number of output samples that finish() would return."""
        return self._n_expected() - self._n_out

    def push(self, pcm: np.ndarray) -> np.ndarray:
        """pcm: [n] int16. Returns [m] int16, all output whose filters have all their input."""
        if self._passes:
            return pcm
        self._n_in += len(pcm)
        self._input = np.concatenate((self._input, pcm.astype(np.float64)))
        return self._emit()

    def finish(self) -> np.ndarray:
        """Returns the owed samples, as if silence followed, and starts a new stream."""
        owed = self.owed_samples
        self._input = np.concatenate((self._input, np.zeros(len(self._blocks[-1][1]), np.float64)))
        rest = self._emit()[:owed]
        self._start()
        return rest

    def _start(self) -> None:
        self._n_in = 0
        self._n_out = 0
        # Sample 0 of _input is the first one that the filters of the next block need.
        self._input = np.zeros(self._reach - 1, np.float64)

    def _n_expected(self) -> int:
        return self._n_out if self._passes else -(-self._n_in * self._up // self._down)

    def _emit(self) -> np.ndarray:
        parts = [part for block in self._blocks if len(part := self._filtered(*block))]
        out = parts[0] if len(parts) == 1 else np.concatenate([*parts, _NOTHING])
        self._n_out += len(out)
        return to_int16(out)

    def _filtered(self, block_in: int, taps: np.ndarray) -> np.ndarray:
        n_taps = len(taps)
        n_blocks = (len(self._input) - n_taps) // block_in + 1
        if n_blocks < 1:
            return _NOTHING
        # The same as sliding_window_view, whose checks take longer than the filter on 20 ms pieces.
        strides = (8 * block_in, 8)
        windows = np.ndarray((n_blocks, n_taps), np.float64, self._input, 0, strides)
        # Copied, because BLAS accepts no overlapping rows and numpy's own product is slow. Double
        # precision, because BLAS adds in an order that depends on the number of rows.
        out: np.ndarray = np.ascontiguousarray(windows) @ taps
        self._input = self._input[n_blocks * block_in :]
        return out.ravel()


def resample(pcm: np.ndarray, rate_in_hz: int, rate_out_hz: int) -> np.ndarray:
    """Change the rate of a whole clip; pcm: [n] int16. Returns [ceil(n * out / in)] int16."""
    n_out = -(-len(pcm) * rate_out_hz // rate_in_hz)
    # As float: soxr adds dither to integers, so silence would not stay silent.
    resampled = to_int16(soxr.resample(pcm.astype(np.float32), rate_in_hz, rate_out_hz))[:n_out]
    return np.pad(resampled, (0, n_out - len(resampled)))


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Round and clip float samples on the int16 scale."""
    rounded: np.ndarray = np.rint(samples)
    np.maximum(rounded, -32768, out=rounded)
    np.minimum(rounded, 32767, out=rounded)
    return rounded.astype(np.int16)


def _reach(up: int, down: int) -> int:
    """Input samples on each side of an output sample that its filter needs."""
    # Downsampling needs a longer filter.
    return int(np.ceil(_ZERO_CROSSINGS * max(1.0, down / up)))


@lru_cache(maxsize=32)  # more than the protocol's pairs of rates
def _block_taps(up: int, down: int, periods: int) -> np.ndarray:
    """Kaiser-windowed sinc, [n_taps, n]; columns sum to one so that DC has a gain of exactly 1."""
    reach, cutoff, n = _reach(up, down), _CUTOFF / max(1.0, down / up), periods * up
    # Output sample p of a block is at input sample p * down / up.
    taps = np.zeros(((n - 1) * down // up + 2 * reach, n))
    for p in range(n):
        whole, part = divmod(p * down, up)
        t = np.arange(2 * reach) - (reach - 1) - part / up  # input samples around the output
        window = np.i0(_KAISER_BETA * np.sqrt(np.clip(1 - (t / reach) ** 2, 0, None)))
        row = np.sinc(cutoff * t) * window
        taps[whole : whole + 2 * reach, p] = row / row.sum()
    return taps
