"""Mel bands on Slaney's scale, as in librosa: linear up to 1 kHz, logarithmic above."""

from functools import cache

import numpy as np
import numpy.typing as npt

_LINEAR_HZ, _KNEE_HZ, _KNEE_MEL, _STEP = 200 / 3, 1000.0, 15.0, float(np.log(6.4)) / 27


@cache
def slaney_filters(n_bands: int, n_fft: int, rate_hz: int) -> npt.NDArray[np.float32]:
    """[n_bands, n_fft // 2 + 1]: triangles of equal area, from 0 to half the rate."""
    edges = _slaney_hz(np.linspace(0, _slaney_mel(rate_hz / 2), n_bands + 2))
    hz = np.linspace(0, rate_hz / 2, n_fft // 2 + 1)
    below, centre, above = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    slopes = np.minimum((hz - below) / (centre - below), (above - hz) / (above - centre))
    filters: npt.NDArray[np.float32]
    filters = (np.maximum(slopes, 0) * 2 / (above - below)).astype(np.float32)
    return filters


def _slaney_mel(hz: float) -> float:
    if hz < _KNEE_HZ:
        return hz / _LINEAR_HZ
    return _KNEE_MEL + float(np.log(hz / _KNEE_HZ)) / _STEP


def _slaney_hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = _KNEE_HZ * np.exp(_STEP * (mel - _KNEE_MEL))
    return np.where(mel < _KNEE_MEL, mel * _LINEAR_HZ, above)
