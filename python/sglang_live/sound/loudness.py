"""How loud a sound is, as listeners judge it.

Source: ITU-R BS.1770-4; the coefficients of its filters at any rate are those of pyloudnorm.
"""

import math

import numpy as np
import numpy.typing as npt

from sglang_live.sound.decoder import Samples

# A block lasts 400 ms, and begins at a quarter of the one before.
_BLOCK_S, _STEPS = 0.4, 4
# Softer blocks count as silence: of all, and below the mean of the others.
_LEAST_DB, _BELOW_DB = -70.0, 10.0
_OFFSET_DB = -0.691
# The head lifts high sounds; deep ones are hardly heard.
_SHELF_HZ, _SHELF_Q, _SHELF_DB = 1500.0, 1 / math.sqrt(2), 4.0
_DEEP_HZ, _DEEP_Q = 38.0, 0.5
# After which the filters ring no more.
_RING_S = 1.0


def loudness_db(samples: Samples, rate_hz: int) -> float:
    """In LUFS, of [n] samples, at least 0.4 s; -inf: of silence."""
    heard = _weighted(samples, rate_hz)
    n_blocks = round((len(heard) / rate_hz / _BLOCK_S - 1) * _STEPS) + 1
    ends = [int(_BLOCK_S * i / _STEPS * rate_hz) for i in range(n_blocks + _STEPS)]
    sums = [float(np.square(heard[ends[i] : ends[i + _STEPS]]).sum()) for i in range(n_blocks)]
    powers = np.array(sums) / (_BLOCK_S * rate_hz)
    loud = powers[_in_db(powers) >= _LEAST_DB]
    if not len(loud):
        return -math.inf
    loud = loud[_in_db(loud) > _in_db(loud.mean()) - _BELOW_DB]
    return float(_in_db(loud.mean()))


def _in_db(power: npt.ArrayLike) -> np.ndarray:
    decibels: np.ndarray = _OFFSET_DB + 10 * np.log10(np.maximum(power, 1e-30))
    return decibels


def _weighted(samples: Samples, rate_hz: int) -> npt.NDArray[np.float64]:
    n = len(samples) + round(_RING_S * rate_hz)
    turns = 2 * math.pi * np.arange(n // 2 + 1) / n
    delays = np.exp(-1j * np.outer(np.arange(3), turns))
    response = np.ones(len(turns), complex)
    for above, below in (_shelf(rate_hz), _high_pass(rate_hz)):
        response *= (np.array(above) @ delays) / (np.array(below) @ delays)
    found: npt.NDArray[np.float64] = np.fft.irfft(np.fft.rfft(samples, n) * response, n)
    return found[: len(samples)]


def _shelf(rate_hz: int) -> tuple[list[float], list[float]]:
    gain, turn = 10 ** (_SHELF_DB / 40), 2 * math.pi * _SHELF_HZ / rate_hz
    width = math.sin(turn) / (2 * _SHELF_Q) * 2 * math.sqrt(gain)
    plus, minus, cosine = gain + 1, gain - 1, math.cos(turn)
    above = [
        gain * (plus + minus * cosine + width),
        -2 * gain * (minus + plus * cosine),
        gain * (plus + minus * cosine - width),
    ]
    below = [
        plus - minus * cosine + width,
        2 * (minus - plus * cosine),
        plus - minus * cosine - width,
    ]
    return above, below


def _high_pass(rate_hz: int) -> tuple[list[float], list[float]]:
    turn = 2 * math.pi * _DEEP_HZ / rate_hz
    cosine, width = math.cos(turn), math.sin(turn) / (2 * _DEEP_Q)
    above = [(1 + cosine) / 2, -(1 + cosine), (1 + cosine) / 2]
    return above, [1 + width, -2 * cosine, 1 - width]
