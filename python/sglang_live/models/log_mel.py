"""Whisper's spectrogram, which encoders of speech read that were trained after it.

Source: openai/whisper (audio.py: log_mel_spectrogram), MIT.
"""

import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

from sglang_live.core import INPUT_RATE_HZ

HOP = 160
_N_FFT = 400


class LogMel:
    """n_mels: of a frame of 10 ms."""

    def __init__(self, n_mels: int):
        scale = {"norm": "slaney", "mel_scale": "slaney"}
        filters = mel_filter_bank(
            1 + _N_FFT // 2, n_mels, 0.0, INPUT_RATE_HZ / 2, INPUT_RATE_HZ, **scale
        )
        self._filters = torch.tensor(filters.T, dtype=torch.float32)
        self._window = torch.hann_window(_N_FFT)

    def __call__(self, samples: Tensor) -> Tensor:
        """[n_mels, n_frames] of [n] in [-1, 1] at INPUT_RATE_HZ; n_frames is n // HOP."""
        spectrum = torch.stft(samples, _N_FFT, HOP, window=self._window, return_complex=True)
        mels = self._filters @ spectrum[:, :-1].abs().square()
        logs = mels.clamp(min=1e-10).log10()
        return (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0
