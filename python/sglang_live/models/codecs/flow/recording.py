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
from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow import RECORDING_RATE_HZ as RATE_HZ
from sglang_live.models.codecs.flow.encoder import UPSAMPLING
from sglang_live.models.log_mel import log_magnitudes, slaney_bands
from sglang_live.sound.decoder import Samples

SPEAKER_WIDTH = 192
# Of columns of mel, 20 ms.
HOP = 480
_N_FFT, _N_MELS = 1920, 80
# Kaldi's: frames of 25 ms, one every 10 ms.
_FRAME, _STEP, _N_KALDI_FFT, _LEAST_HZ = 400, 160, 512, 20.0
_PREEMPHASIS, _POVEY = 0.97, 0.85


def at_16khz(samples: Samples) -> Tensor:
    """Of samples at RATE_HZ."""
    return torch.from_numpy(soxr.resample(samples, RATE_HZ, INPUT_RATE_HZ))


def mel_columns(samples: Samples, most_hz: float) -> Tensor:
    """[n // HOP, n_mels] of [n] samples at RATE_HZ. most_hz: up to which the mels go."""
    bands = slaney_bands(_N_MELS, _N_FFT, RATE_HZ, most_hz)
    return log_magnitudes(torch.from_numpy(samples), _N_FFT, HOP, bands).T


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


def values_of(codes: Tensor, mel: Tensor, speaker: Tensor) -> np.ndarray:
    """[n] float32: a voice as one row of values. Codes are exact in it.

    codes: [n_codes]. mel: [UPSAMPLING * n_codes, n_mels]. speaker: [SPEAKER_WIDTH].
    """
    columns = mel.reshape(len(codes), UPSAMPLING * _N_MELS)
    rows = torch.cat((codes[:, None].float(), columns), dim=1)
    found: np.ndarray = torch.cat((speaker.float(), rows.flatten())).numpy()
    return found


def voice_in(values: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, mel and speaker of values_of. Raises BadInputError: they are of another model."""
    n, width = values.size - SPEAKER_WIDTH, 1 + UPSAMPLING * _N_MELS
    if n <= 0 or n % width:
        raise BadInputError(f"another model made the voice: {values.size} values")
    speaker, rest = torch.tensor(values).flatten().split((SPEAKER_WIDTH, n))
    rows = rest.reshape(-1, width)
    return rows[:, 0].long(), rows[:, 1:].reshape(-1, _N_MELS), speaker


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
