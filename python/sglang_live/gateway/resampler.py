"""Streaming change of sample rate with a few milliseconds of delay.

In: int16 mono audio in pieces of any length. Out: the same at another rate.
Owner: one StreamResampler per direction and caller.
Why not soxr's stream: it holds back up to 37 ms (24 to 16 kHz) or 115 ms (8 to 16 kHz) of
audio, all of which would be added to the time until the caller hears an answer.
"""

from dataclasses import dataclass
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
    """What was pushed lies in a buffer that stays: new ones for each push cost more than the
    filter, once thousands of a second have scattered the heap."""

    def __init__(self, rate_in_hz: int, rate_out_hz: int):
        divisor = gcd(rate_in_hz, rate_out_hz)
        self._up, self._down = rate_out_hz // divisor, rate_in_hz // divisor
        self._passes = self._up == self._down
        self._taps = _taps(self._up, self._down)
        self._start()

    @property
    def owed_samples(self) -> int:
        """Output samples that finish() would return."""
        return self._n_expected() - self._n_out

    def push(self, pcm: np.ndarray) -> np.ndarray:
        """pcm: [n] int16. Returns [m] int16, all the output whose filters are complete."""
        if self._passes:
            return pcm
        self._n_in += len(pcm)
        self._take(pcm)
        return self._emit()

    def finish(self) -> np.ndarray:
        """Return what is owed, as if silence followed, and begin a new stream."""
        owed = self.owed_samples
        self._take(np.zeros(len(self._taps.one), np.int16))
        rest = self._emit()[:owed]
        self._start()
        return rest

    def _start(self) -> None:
        self._n_in = 0
        self._n_out = 0
        # Input from the first sample on that the next output needs, and room for more.
        self._n_held = self._taps.reach - 1
        self._input = np.zeros(4 * self._taps.reach, np.float64)

    def _n_expected(self) -> int:
        return self._n_out if self._passes else -(-self._n_in * self._up // self._down)

    def _take(self, pcm: np.ndarray) -> None:
        end = self._n_held + len(pcm)
        if end > len(self._input):
            self._input = np.concatenate((self._input[: self._n_held], np.zeros(end)))
        self._input[self._n_held : end] = pcm
        self._n_held = end

    def _emit(self) -> np.ndarray:
        held = self._input[: self._n_held]
        blocks = self._taps.in_blocks(held)
        used = self._taps.block_in * len(blocks)
        rest = self._taps.one_by_one(held[used:], self._down)
        used += self._down * len(rest)
        self._n_held -= used
        self._input[: self._n_held] = held[used:]
        out = np.concatenate((blocks.ravel(), rest.ravel()))
        self._n_out += len(out)
        return to_int16(out)


@dataclass(frozen=True, slots=True, eq=False)
class _Taps:
    """The filter, for the repetitions of its pattern in long blocks and one at a time.

    In double precision, because the order in which products are added depends on the block.

    Attributes:
        reach: input samples that an output sample needs on each side.
        block_in: input samples from one long block to the next; a block needs two of them.
        first, second: [block_in, n], what these two give for the n output samples of a block, the
            first of which is `reach - 1` inputs after the block's beginning.
        one: [n_taps, up], the same of a block that is one repetition.
    """

    reach: int
    block_in: int
    first: np.ndarray
    second: np.ndarray
    one: np.ndarray

    def in_blocks(self, held: np.ndarray) -> np.ndarray:
        """[blocks, n] of as many long blocks as there are inputs for."""
        n_blocks = max(len(held) // self.block_in - 1, 0)
        if not n_blocks:
            return np.zeros((0, self.first.shape[1]))
        rows = held[: (n_blocks + 1) * self.block_in].reshape(n_blocks + 1, self.block_in)
        out = rows[:-1] @ self.first
        out += rows[1:] @ self.second
        return out

    def one_by_one(self, held: np.ndarray, down: int) -> np.ndarray:
        """[repetitions, up] of what is left, so that nothing comes later than it could."""
        n_taps = len(self.one)
        n = max(0, (len(held) - n_taps) // down + 1)
        # As sliding_window_view, whose checks cost more than the filter on pieces of 20 ms.
        windows = np.ndarray((n, n_taps), np.float64, held, 0, (8 * down, 8))
        # Copied, because BLAS takes no rows that overlap, and numpy's own product is slow.
        return np.ascontiguousarray(windows) @ self.one


def resample(pcm: np.ndarray, rate_in_hz: int, rate_out_hz: int) -> np.ndarray:
    """Change the rate of a whole clip; pcm: [n] int16. Returns [ceil(n * out / in)] int16."""
    n_out = -(-len(pcm) * rate_out_hz // rate_in_hz)
    # As float: of integers it makes integers with dither, and silence would not stay silent.
    made = to_int16(soxr.resample(pcm.astype(np.float32), rate_in_hz, rate_out_hz))[:n_out]
    return np.pad(made, (0, n_out - len(made)))


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Round and clip float samples on the int16 scale."""
    rounded = np.rint(samples)
    np.maximum(rounded, -32768, out=rounded)
    np.minimum(rounded, 32767, out=rounded)
    return rounded.astype(np.int16)


def _reach(up: int, down: int) -> int:
    """Input samples on each side of an output sample that its filter needs."""
    # Below the input rate the filter gets longer.
    return int(np.ceil(_ZERO_CROSSINGS * max(1.0, down / up)))


@lru_cache(maxsize=32)  # the protocol has few rates
def _taps(up: int, down: int) -> _Taps:
    reach = _reach(up, down)
    repetitions = -(-2 * reach // down)  # so many that a block needs no more than the next one
    block_in = repetitions * down
    block = _block_taps(up, down, repetitions)
    block = np.pad(block, ((0, 2 * block_in - len(block)), (0, 0)))
    return _Taps(
        reach=reach,
        block_in=block_in,
        first=block[:block_in],
        second=block[block_in:],
        one=_block_taps(up, down, 1),
    )


def _block_taps(up: int, down: int, repetitions: int) -> np.ndarray:
    """Kaiser-windowed sinc, [n_taps, n]; columns sum to one so that DC passes exactly."""
    reach, cutoff, n = _reach(up, down), _CUTOFF / max(1.0, down / up), repetitions * up
    # Output sample p of a block is at input sample p * down / up.
    taps = np.zeros(((n - 1) * down // up + 2 * reach, n))
    for p in range(n):
        whole, part = divmod(p * down, up)
        t = np.arange(2 * reach) - (reach - 1) - part / up  # input samples around the output
        window = np.i0(_KAISER_BETA * np.sqrt(np.clip(1 - (t / reach) ** 2, 0, None)))
        row = np.sinc(cutoff * t) * window
        taps[whole : whole + 2 * reach, p] = row / row.sum()
    return taps
