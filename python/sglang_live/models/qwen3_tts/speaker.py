"""The speaker encoder of a Qwen3-TTS Base checkpoint: from recordings to the embeddings that stand
at the speaker's place in a prompt.

An ECAPA-TDNN (arXiv 2005.07143) over a mel spectrogram, computed on the CPU in float32.
Source: qwen_tts, Qwen3TTSSpeakerEncoder and extract_speaker_embedding.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_live.models.family import read_json
from sglang_live.models.log_mel import log_magnitudes, slaney_bands
from sglang_live.models.qwen3_tts.family import SPEAKER_ENCODER
from sglang_live.models.qwen3_tts.family import VOICE_RATE_HZ as RATE_HZ
from sglang_live.models.speech_lm.checkpoint import fill
from sglang_live.models.voice_files import read_recording

_N_FFT, _HOP, _N_MELS = 1024, 256, 128
_LEAST_VARIANCE = 1e-12


def embeddings_of(checkpoint: Path, files: Sequence[Path]) -> Tensor:
    """[n_files, talker_hidden] float32: the embedding of each recording's speaker.

    Raises:
        BadInputError: a recording cannot be read (voice_files.py).
        ValueError: the checkpoint's tensors are not those of its config.
    """
    encoder = SpeakerEncoder.from_pretrained(checkpoint)
    return torch.stack([encoder.embed(read_recording(file, RATE_HZ)) for file in files])


class SpeakerEncoder(nn.Module):
    """config: speaker_encoder_config of the checkpoint; what it lacks has the reference's value."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        widths = config.get("enc_channels", (512, 512, 512, 512, 1536))
        kernels = config.get("enc_kernel_sizes", (5, 3, 3, 3, 1))
        dilations = config.get("enc_dilations", (1, 2, 3, 4, 1))
        shapes = list(zip(widths, kernels, dilations, strict=True))
        n_parts = config.get("enc_res2net_scale", 8)
        n_squeezed = config.get("enc_se_channels", 128)
        first, *middle = shapes[:-1]
        self.blocks = nn.ModuleList([_Layer(_N_MELS, *first)])
        self.blocks.extend(_Block(*shape, n_parts, n_squeezed) for shape in middle)
        self.mfa = _Layer(widths[-1], *shapes[-1])
        self.asp = _Pooling(widths[-1], config.get("enc_attention_channels", 128))
        self.fc = _conv(2 * widths[-1], config["enc_dim"])

    @classmethod
    def from_pretrained(cls, checkpoint: Path) -> "SpeakerEncoder":
        config = read_json(checkpoint / "config.json")[SPEAKER_ENCODER]
        with torch.device("meta"):
            encoder = cls(config)
        fill(encoder, checkpoint, "speaker_encoder.")
        return encoder.eval()

    @torch.no_grad()
    def embed(self, samples: npt.NDArray[np.float32]) -> Tensor:
        """[enc_dim] of a recording. samples: [n] in [-1, 1] at RATE_HZ."""
        x = log_mels(torch.from_numpy(samples))[None]
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        x = self.mfa(torch.cat(outputs[1:], dim=1))
        embedding: Tensor = self.fc(self.asp(x))[0, :, 0]
        return embedding


def log_mels(samples: Tensor) -> Tensor:
    """[n_mels, n_frames] of [n_samples]: logarithms of magnitudes in Slaney's mel bands."""
    bands = slaney_bands(_N_MELS, _N_FFT, RATE_HZ, RATE_HZ / 2)
    return log_magnitudes(samples, _N_FFT, _HOP, bands)


def _conv(n_in: int, n_out: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(n_in, n_out, kernel, dilation=dilation, padding="same", padding_mode="reflect")


class _Layer(nn.Module):
    def __init__(self, n_in: int, n_out: int, kernel: int = 1, dilation: int = 1):
        super().__init__()
        self.conv = _conv(n_in, n_out, kernel, dilation)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class _Block(nn.Module):
    """SE-Res2Net: what goes through it is added to what came in."""

    def __init__(self, width: int, kernel: int, dilation: int, n_parts: int, n_squeezed: int):
        super().__init__()
        self.tdnn1 = _Layer(width, width)
        self.tdnn2 = _Layer(width, width)
        self.res2net_block = _Parts(width, kernel, dilation, n_parts)
        self.se_block = _Squeeze(width, n_squeezed)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return x + inner


class _Parts(nn.Module):
    """Each part of the channels but the first goes through a layer, with the output before it."""

    def __init__(self, width: int, kernel: int, dilation: int, n_parts: int):
        super().__init__()
        part = width // n_parts
        self.blocks = nn.ModuleList(
            _Layer(part, part, kernel, dilation) for _ in range(n_parts - 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *parts = x.chunk(len(self.blocks) + 1, dim=1)
        outputs, before = [first], torch.zeros_like(first)
        for layer, part in zip(self.blocks, parts, strict=True):
            before = layer(part + before)
            outputs.append(before)
        return torch.cat(outputs, dim=1)


class _Squeeze(nn.Module):
    """Scales each channel by what the mean of all channels over time says."""

    def __init__(self, width: int, n_squeezed: int):
        super().__init__()
        self.conv1 = _conv(width, n_squeezed)
        self.conv2 = _conv(n_squeezed, width)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=2, keepdim=True)
        return x * self.conv2(F.relu(self.conv1(mean))).sigmoid()


class _Pooling(nn.Module):
    """[1, width, n] -> [1, 2 * width, 1]: mean and deviation over time, weighted by attention."""

    def __init__(self, width: int, n_attention: int):
        super().__init__()
        self.tdnn = _Layer(3 * width, n_attention)
        self.conv = _conv(n_attention, width)

    def forward(self, x: Tensor) -> Tensor:
        even = torch.full_like(x[:, :1], 1 / x.shape[2])
        mean, deviation = _moments(x, even)
        seen = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), dim=1)
        weights = self.conv(self.tdnn(seen).tanh()).softmax(dim=2)
        return torch.cat(_moments(x, weights), dim=1)


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[1, width, 1] each. weights: over time, of sum 1."""
    mean = (weights * x).sum(dim=2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=2, keepdim=True)
    return mean, variance.clamp(min=_LEAST_VARIANCE).sqrt()
