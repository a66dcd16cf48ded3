"""Speech at another speed and the same pitch, while it is made.

In: int16 mono audio in pieces of any length. Out: the same speech, shorter or longer.
Owner: one Tempo per response. WSOLA: windows of the input, each placed within a tolerance where it
continues the one before it best, are added at a fixed hop.
FFmpeg's atempo does the same in a process of its own, with twice the delay; numpy costs less than
the way there and back (benchmark/notes/reach.md).
Source: Verhelst and Roelands, ICASSP 1993.
"""

import numpy as np

MIN_SPEED, MAX_SPEED = 0.25, 4.0
_WINDOW_S, _TOLERANCE_S = 0.025, 0.008
# The search is coarse first: speech below 4 kHz determines where a window fits.
_COARSE = 3


class Tempo:
    def __init__(self, speed: float, rate_hz: int):
        """speed: MIN_SPEED to MAX_SPEED; above 1 is faster."""
        self._speed = speed
        self._hop = round(_WINDOW_S * rate_hz / 2)
        self._tolerance = round(_TOLERANCE_S * rate_hz)
        # Two of them, half a window apart, add up to one.
        self._rise = np.sin(np.pi / 2 * (np.arange(self._hop) + 0.5) / self._hop) ** 2
        self._input = np.zeros(0)
        self._begin = 0  # of _input, in the whole input
        self._n_in = 0
        self._n_out = 0
        self._n_windows = 0
        self._follows = 0  # where the last window goes on

    def push(self, pcm: bytes) -> bytes:
        """pcm: int16 little-endian, whole samples. Returns what is complete: within 50 ms."""
        samples = np.frombuffer(pcm, "<i2")
        self._n_in += len(samples)
        self._input = np.concatenate((self._input, samples))
        return self._windows()

    def finish(self) -> bytes:
        """The rest: in all, the input's length divided by the speed."""
        left = round(self._n_in / self._speed) - self._n_out
        n_windows = -(-left // self._hop) + 1
        end = self._nominal(self._n_windows + n_windows) + 2 * (self._hop + self._tolerance)
        missing = max(0, end - self._begin - len(self._input))
        self._input = np.concatenate((self._input, np.zeros(missing)))
        return self._windows()[: 2 * left]

    def _windows(self) -> bytes:
        parts = []
        while True:
            nominal = self._nominal(self._n_windows)
            last = max(nominal + self._tolerance, self._follows) + 2 * self._hop
            if last > self._begin + len(self._input):
                break
            parts.append(self._next(nominal))
            keep = min(self._follows, self._nominal(self._n_windows) - self._tolerance)
            drop = max(0, keep - self._begin)
            self._input, self._begin = self._input[drop:], self._begin + drop
        self._n_out += self._hop * len(parts)
        ready: bytes = np.rint(np.concatenate((*parts, np.zeros(0)))).astype("<i2").tobytes()
        return ready

    def _next(self, nominal: int) -> np.ndarray:
        """[hop]: the end of the last window fades into the begin of the next one."""
        old = self._at(self._follows, 2 * self._hop)
        begin = nominal if self._n_windows == 0 else self._best(nominal, old)
        new = self._at(begin, self._hop)
        self._follows = begin + self._hop
        self._n_windows += 1
        mixed: np.ndarray = old[: self._hop] * self._rise[::-1] + new * self._rise
        return mixed

    def _best(self, nominal: int, wanted: np.ndarray) -> int:
        """Where near `nominal` the input resembles `wanted` most."""
        first = max(nominal - self._tolerance, self._begin)
        heard = self._at(first, nominal + self._tolerance - first + len(wanted))
        best = _COARSE * _likest(heard[::_COARSE], wanted[::_COARSE])
        low = max(0, best - _COARSE + 1)
        near = heard[low : best + _COARSE - 1 + len(wanted)]
        return first + low + _likest(near, wanted)

    def _nominal(self, n: int) -> int:
        return round(n * self._hop * self._speed)

    def _at(self, begin: int, n: int) -> np.ndarray:
        at = begin - self._begin
        return self._input[at : at + n]


def _likest(heard: np.ndarray, wanted: np.ndarray) -> int:
    """Where `heard` correlates with `wanted` most, relative to its energy there."""
    products = np.correlate(heard, wanted)
    energies = np.cumsum(np.concatenate(([0.0], heard * heard)))
    return int(
        np.argmax(products / np.sqrt(energies[len(wanted) :] - energies[: -len(wanted)] + 1))
    )
