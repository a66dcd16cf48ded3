"""Spectrograms that several models of speech read: Whisper's, and that of vocoders.

Source: openai/whisper (audio.py: log_mel_spectrogram), MIT; jik876/hifi-gan (meldataset.py:
mel_spectrogram), MIT, which others have gone on from.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

from sglang_live.core import INPUT_RATE_HZ

HOP = 160
_N_FFT = 400
# Of a vocoder's.
_LEAST_POWER, _LEAST_MEL = 1e-9, 1e-5


class LogMel:
    """n_mels: of a frame of 10 ms."""

    def __init__(self, n_mels: int):
        self._filters = slaney_bands(n_mels, _N_FFT, INPUT_RATE_HZ, INPUT_RATE_HZ / 2)
        self._window = torch.hann_window(_N_FFT)

    def __call__(self, samples: Tensor) -> Tensor:
        """[n_mels, n_frames] of [n] in [-1, 1] at INPUT_RATE_HZ; n_frames is n // HOP."""
        spectrum = torch.stft(samples, _N_FFT, HOP, window=self._window, return_complex=True)
        mels = self._filters @ spectrum[:, :-1].abs().square()
        logs = mels.clamp(min=1e-10).log10()
        return (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0


def log_magnitudes(samples: Tensor, n_fft: int, hop: int, bands: Tensor) -> Tensor:
    """[n_mels, n // hop] of [n] samples in [-1, 1]. bands: [n_mels, n_fft / 2 + 1]."""
    padding = (n_fft - hop) // 2
    padded = F.pad(samples[None], (padding, padding), mode="reflect")[0]
    window = torch.hann_window(n_fft)
    spectrum = torch.stft(padded, n_fft, hop, window=window, center=False, return_complex=True)
    magnitudes = (torch.view_as_real(spectrum).square().sum(-1) + _LEAST_POWER).sqrt()
    return (bands @ magnitudes).clamp(min=_LEAST_MEL).log()


@cache
def slaney_bands(n_mels: int, n_fft: int, rate_hz: int, most_hz: float) -> Tensor:
    """[n_mels, n_fft / 2 + 1], from 0 to most_hz."""
    scale = {"norm": "slaney", "mel_scale": "slaney"}
    bands = mel_filter_bank(1 + n_fft // 2, n_mels, 0.0, most_hz, rate_hz, **scale)
    return torch.tensor(bands.T, dtype=torch.float32)
