"""Of a recording: what models hear that make a flow's voice of it.

In: samples at 24 kHz. Out: the mel that the flow goes on from, and what is heard of the speaker.
Source: FunAudioLLM/CosyVoice (cli/frontend.py, Apache-2.0), shivammehta25/Matcha-TTS
(utils/audio.py, MIT), Kaldi's compute-fbank-feats.
"""

from functools import cache

import numpy as np
import soxr
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.models.codecs.flow.encoder import UPSAMPLING
from sglang_live.sound.decoder import Samples

RATE_HZ = 24_000
# Of columns of mel, 20 ms.
HOP = 480
_N_FFT, _N_MELS = 1920, 80
_LEAST_POWER, _LEAST_MEL = 1e-9, 1e-5
# Kaldi's: frames of 25 ms, one every 10 ms.
_FRAME, _STEP, _N_KALDI_FFT, _LEAST_HZ = 400, 160, 512, 20.0
_PREEMPHASIS, _POVEY = 0.97, 0.85


def at_16khz(samples: Samples) -> Tensor:
    """Of samples at RATE_HZ."""
    resampled: np.ndarray = soxr.resample(samples, RATE_HZ, INPUT_RATE_HZ)
    return torch.from_numpy(np.clip(resampled, -1.0, 1.0))


def mel_columns(samples: Samples, most_hz: float) -> Tensor:
    """[n // HOP, n_mels] of [n] samples at RATE_HZ. most_hz: up to which the mels go."""
    padding = (_N_FFT - HOP) // 2
    padded = F.pad(torch.from_numpy(samples)[None], (padding, padding), mode="reflect")[0]
    window = torch.hann_window(_N_FFT)
    spectrum = torch.stft(padded, _N_FFT, HOP, window=window, center=False, return_complex=True)
    magnitudes = (torch.view_as_real(spectrum).square().sum(-1) + _LEAST_POWER).sqrt()
    return (_mel_bands(most_hz) @ magnitudes).clamp(min=_LEAST_MEL).log().T


def speaker_frames(samples: Tensor) -> Tensor:
    """[n_frames, n_mels] of [n] samples at INPUT_RATE_HZ: each mel is 0 on average."""
    frames = samples.unfold(0, _FRAME, _STEP)
    frames = frames - frames.mean(dim=1, keepdim=True)
    before = F.pad(frames[None], (1, 0), mode="replicate")[0, :, :-1]
    window = torch.hann_window(_FRAME, periodic=False).pow(_POVEY)
    spectrum = torch.fft.rfft((frames - _PREEMPHASIS * before) * window, _N_KALDI_FFT)
    mels = spectrum.abs().square() @ _kaldi_bands()
    logs = mels.clamp(min=torch.finfo(torch.float32).eps).log()
    return logs - logs.mean(dim=0)


def joined(codes: Tensor, n_samples: int) -> Tensor:
    """The codes of a recording of this many samples at RATE_HZ that have all their columns."""
    return codes[: n_samples // HOP // UPSAMPLING]


@cache
def _mel_bands(most_hz: float) -> Tensor:
    """[n_mels, n_fft / 2 + 1]."""
    scale = {"norm": "slaney", "mel_scale": "slaney"}
    bands = mel_filter_bank(1 + _N_FFT // 2, _N_MELS, 0.0, most_hz, RATE_HZ, **scale)
    return torch.tensor(bands.T, dtype=torch.float32)


@cache
def _kaldi_bands() -> Tensor:
    """[n_fft / 2 + 1, n_mels]."""
    bands = mel_filter_bank(
        1 + _N_KALDI_FFT // 2,
        _N_MELS,
        _LEAST_HZ,
        INPUT_RATE_HZ / 2,
        INPUT_RATE_HZ,
        mel_scale="kaldi",
        triangularize_in_mel_space=True,
    )
    return torch.tensor(bands, dtype=torch.float32)
