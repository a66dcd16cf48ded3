"""Chatterbox's voice encoder: three LSTM layers over a mel spectrogram of power.

In: speech at 16 kHz. Out: an embedding of its speaker, of length 1. Computed in float32, on the
CPU. Its sizes are those of its weights.
Source: resemble-ai/chatterbox (models/voice_encoder, MIT), after arXiv:1710.10467.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.models.log_mel import slaney_bands

_N_FFT, _HOP = 400, 160
# Parts of 160 frames of 10 ms are heard, of which one begins 77 behind the other; of the last one
# a fifth may be silence.
_PART, _STEP, _LEAST_SHARE = 160, 77, 0.8
# What is 20 dB softer than the loudest frame is cut off before and behind.
_FRAME, _FRAME_HOP, _SOFT_DB, _LEAST_RMS = 2048, 512, 20.0, 1e-5


class VoiceEncoder:
    """tensors: by their names in ve.safetensors. Raises KeyError or RuntimeError: one is missing,
    or does not fit the others."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        lstm = {
            name.removeprefix("lstm."): tensor
            for name, tensor in tensors.items()
            if name.startswith("lstm.")
        }
        n_wide, self._n_mels = lstm["weight_ih_l0"].shape
        n_layers = sum(name.startswith("weight_ih") for name in lstm)
        self._lstm = nn.LSTM(self._n_mels, n_wide // 4, n_layers, batch_first=True)
        self._lstm.load_state_dict(lstm)
        self._last = tensors["proj.weight"], tensors["proj.bias"]

    @torch.inference_mode()
    def embed(self, samples: Tensor) -> Tensor:
        """[n_values] of [n] samples at INPUT_RATE_HZ, at least one not 0."""
        mels = self._mels(trimmed(samples))
        n_parts = _n_parts(len(mels))
        mels = F.pad(mels, (0, 0, 0, max(0, _PART + _STEP * (n_parts - 1) - len(mels))))
        parts = mels.unfold(0, _PART, _STEP)[:n_parts].transpose(1, 2)
        _, (hidden, _) = self._lstm(parts)
        found = F.normalize(F.linear(hidden[-1], *self._last).relu(), dim=1)
        return F.normalize(found.mean(dim=0), dim=0)

    def _mels(self, samples: Tensor) -> Tensor:
        bands = slaney_bands(self._n_mels, _N_FFT, INPUT_RATE_HZ, INPUT_RATE_HZ / 2)
        window = torch.hann_window(_N_FFT)
        spectrum = torch.stft(samples, _N_FFT, _HOP, window=window, return_complex=True)
        return (bands @ spectrum.abs().square()).T


def trimmed(samples: Tensor) -> Tensor:
    """Without what is soft before and behind it."""
    padded = F.pad(samples, (_FRAME // 2, _FRAME // 2))
    rms = padded.unfold(0, _FRAME, _FRAME_HOP).square().mean(dim=1).sqrt().clamp(min=_LEAST_RMS)
    loud = (rms > rms.max() * 10 ** (-_SOFT_DB / 20)).nonzero()
    return samples[_FRAME_HOP * int(loud[0]) : _FRAME_HOP * (int(loud[-1]) + 1)]


def _n_parts(n_frames: int) -> int:
    n, rest = divmod(max(n_frames - _PART + _STEP, 0), _STEP)
    return n + (n == 0 or (rest + _PART - _STEP) / _PART >= _LEAST_SHARE)
