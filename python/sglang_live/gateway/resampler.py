"""Streaming change of sample rate with a few milliseconds of delay.

In: int16 mono audio in pieces of any length. Out: the same at another rate.
Owner: one StreamResampler per direction and caller.
Why not soxr's stream: it holds back up to 37 ms (24 to 16 kHz) or 115 ms (8 to 16 kHz) of
audio, all of which would be added to the time until the caller hears an answer.
"""

from functools import lru_cache
from math import gcd

import numpy as np
import soxr

# Zero crossings on each side of the filter's centre: more is sharper, and later.
_ZERO_CROSSINGS = 24
_KAISER_BETA = 8.0  # about 80 dB in the stop band
# Cut-off as a part of the lower Nyquist frequency; the rest is the transition band.
_CUTOFF = 0.92


class StreamResampler:
    def __init__(self, rate_in_hz: int, rate_out_hz: int):
        divisor = gcd(rate_in_hz, rate_out_hz)
        self._up, self._down = rate_out_hz // divisor, rate_in_hz // divisor
        self._passes = self._up == self._down
        # [up, n_taps]: row p gives the output samples that fall p/up after an input sample.
        self._taps = _polyphase_taps(self._up, self._down)
        self._reach = self._taps.shape[1] // 2
        self._start()

    @property
    def owed_samples(self) -> int:
        """Output samples that finish() would return."""
        return self._n_expected() - self._n_out

    def push(self, pcm: np.ndarray) -> np.ndarray:
        """pcm: [n] int16. Returns [m] int16, all output samples whose filter is complete."""
        if self._passes:
            return pcm
        self._n_in += len(pcm)
        self._input = np.concatenate((self._input, pcm.astype(np.float32)))
        return self._emit(len(self._input))

    def finish(self) -> np.ndarray:
        """Return what is owed, as if silence followed, and begin a new stream."""
        owed = self.owed_samples
        self._input = np.concatenate((self._input, np.zeros(2 * self._reach, np.float32)))
        rest = self._emit(len(self._input))[:owed]
        self._start()
        return rest

    def _start(self) -> None:
        self._n_in = 0
        self._n_out = 0
        # Sample 0 of _input is the first one the filter of the next output sample needs.
        self._input = np.zeros(self._reach - 1, np.float32)
        self._phase = 0

    def _n_expected(self) -> int:
        return self._n_out if self._passes else -(-self._n_in * self._up // self._down)

    def _emit(self, n_input: int) -> np.ndarray:
        n_windows = n_input - 2 * self._reach + 1
        if n_windows <= 0:
            return np.zeros(0, np.int16)
        # Output sample k starts at input sample (phase + k * down) // up.
        n_ready = -(-(n_windows * self._up - self._phase) // self._down)
        at = self._phase + np.arange(n_ready) * self._down
        # As sliding_window_view, whose checks cost more than the filter on pieces of 20 ms.
        windows = np.ndarray((n_windows, 2 * self._reach), np.float32, self._input, 0, (4, 4))
        out = np.empty(n_ready, np.float32)
        # The phase repeats after `up` outputs and the start then moves by `down` inputs.
        for first in range(min(self._up, n_ready)):
            rows = windows[at[first] // self._up :: self._down]
            count = len(out[first :: self._up])
            out[first :: self._up] = rows[:count] @ self._taps[at[first] % self._up]
        end = self._phase + n_ready * self._down
        self._input = self._input[end // self._up :]
        self._phase = end % self._up
        self._n_out += n_ready
        return to_int16(out)


def resample(pcm: np.ndarray, rate_in_hz: int, rate_out_hz: int) -> np.ndarray:
    """Change the rate of a whole clip; pcm: [n] int16. Returns [ceil(n * out / in)] int16."""
    n_out = -(-len(pcm) * rate_out_hz // rate_in_hz)
    # As float: of integers it makes integers with dither, and silence would not stay silent.
    made = to_int16(soxr.resample(pcm.astype(np.float32), rate_in_hz, rate_out_hz))[:n_out]
    return np.pad(made, (0, n_out - len(made)))


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Round and clip float samples on the int16 scale."""
    return np.clip(np.rint(samples), -32768, 32767).astype(np.int16)


@lru_cache(maxsize=16)  # the protocol has few rates
def _polyphase_taps(up: int, down: int) -> np.ndarray:
    """Kaiser-windowed sinc, [up, 2 * reach] float32; rows sum to one so that DC passes exactly."""
    widen = max(1.0, down / up)  # below the input rate the filter gets longer
    reach = int(np.ceil(_ZERO_CROSSINGS * widen))
    cutoff = _CUTOFF / widen
    offsets = np.arange(2 * reach) - (reach - 1)  # input samples before and after the output
    rows = []
    for phase in range(up):
        t = offsets - phase / up
        window = np.i0(_KAISER_BETA * np.sqrt(np.clip(1 - (t / reach) ** 2, 0, None)))
        row = np.sinc(cutoff * t) * window
        rows.append(row / row.sum())
    return np.asarray(rows, np.float32)
