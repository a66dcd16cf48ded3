"""The speaker encoder beside a Zonos checkpoint: from recordings to embeddings of their speakers.

A residual network with attention over a mel spectrogram, and a linear discriminant behind it, on
the CPU in float32. Its sizes are those of its weights.
Source: zonos/speaker_cloning.py (Zyphra/Zonos, Apache-2.0).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

from sglang_live.errors import BadInputError
from sglang_live.models.torch_files import read_torch_file
from sglang_live.models.voice_files import read_recording
from sglang_live.models.zonos.family import SPEAKER_FILES, SPEAKER_FOLDER

RATE_HZ = 16_000
_N_FFT, _WINDOW, _HOP, _N_MELS = 512, 400, 160, 80
_LEAST_MEL, _LEAST_VARIANCE, _ATTENTION = 1e-6, 1e-5, 1e-4


def embeddings_of(checkpoint: Path, files: Sequence[Path]) -> Tensor:
    """[n_files, n_values] float32: the embedding of each recording's speaker.

    Raises:
        BadInputError: the encoder or a recording cannot be read.
    """
    encoder = SpeakerEncoder(checkpoint / SPEAKER_FOLDER)
    found = [encoder.embed(torch.from_numpy(read_recording(file, RATE_HZ))) for file in files]
    return torch.stack(found).bfloat16().float()  # as the reference keeps them


class SpeakerEncoder:
    def __init__(self, folder: Path):
        self._network, self._discriminant = (_read(folder / name) for name in SPEAKER_FILES)
        self._folder = folder

    @torch.inference_mode()
    def embed(self, samples: Tensor) -> Tensor:
        """[n_values] of [n] in [-1, 1] at RATE_HZ. Raises BadInputError: a weight is missing."""
        try:
            x = self._convolved(log_mels(samples)[None, None], "front.conv1", "front.bn1", 1).relu()
            for layer in range(1, 5):
                n = 0
                while f"{(name := f'front.layer{layer}.{n}')}.conv1.weight" in self._network:
                    x = self._block(x, name, stride=2 if layer > 1 and n == 0 else 1)
                    n += 1
            pooled = self._pooled(x.flatten(1, 2))
            weight, bias = (self._network[f"bottleneck.{kind}"] for kind in ("weight", "bias"))
            discriminant = self._discriminant
            whole = F.linear(pooled, weight, bias)
            return F.linear(whole, discriminant["weight"], discriminant["bias"])[0]
        except (KeyError, RuntimeError) as error:
            raise BadInputError(
                f"{self._folder} is no speaker encoder of Zonos: {error}"
            ) from error

    def _block(self, x: Tensor, name: str, stride: int) -> Tensor:
        y = self._convolved(x, f"{name}.conv1", f"{name}.bn1", stride).relu()
        y = self._convolved(y, f"{name}.conv2", f"{name}.bn2", 1)
        distance = (y - y.mean(dim=(2, 3), keepdim=True)).square()
        n = y.shape[2] * y.shape[3] - 1
        variance = distance.sum(dim=(2, 3), keepdim=True) / n
        y = y * (distance / (4 * (variance + _ATTENTION)) + 0.5).sigmoid()
        if f"{name}.downsample.0.weight" in self._network:
            x = self._convolved(x, f"{name}.downsample.0", f"{name}.downsample.1", stride)
        return (y + x).relu()

    def _convolved(self, x: Tensor, conv: str, norm: str, stride: int) -> Tensor:
        weight = self._network[f"{conv}.weight"]
        y = F.conv2d(x, weight, stride=stride, padding=weight.shape[2] // 2)
        return self._normed(y, norm)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        of = self._network
        mean, variance = of[f"{name}.running_mean"], of[f"{name}.running_var"]
        return F.batch_norm(x, mean, variance, of[f"{name}.weight"], of[f"{name}.bias"])

    def _pooled(self, x: Tensor) -> Tensor:
        """[1, 2 * n], means and deviations of [1, n, n_columns] by attention."""
        name = "pooling.attention"
        first, last = (
            (self._network[f"{name}.{n}.weight"], self._network[f"{name}.{n}.bias"]) for n in (0, 3)
        )
        hidden = self._normed(F.conv1d(x, *first).relu(), f"{name}.2")
        share = F.conv1d(hidden, *last).softmax(dim=2)
        mean = (x * share).sum(dim=2)
        variance = (x.square() * share).sum(dim=2) - mean.square()
        return torch.cat((mean, variance.clamp(min=_LEAST_VARIANCE).sqrt()), dim=1)


def log_mels(samples: Tensor) -> Tensor:
    """[n_mels, n_columns]; each mel is 0 on average."""
    window = torch.hann_window(_WINDOW, device="cpu", dtype=torch.float32)
    spectrum = torch.stft(
        samples, _N_FFT, _HOP, _WINDOW, window, pad_mode="reflect", return_complex=True
    )
    mels = (_filters() @ spectrum.abs().square() + _LEAST_MEL).log()
    return mels - mels.mean(dim=1, keepdim=True)


@cache
def _filters() -> Tensor:
    bank = mel_filter_bank(_N_FFT // 2 + 1, _N_MELS, 0.0, RATE_HZ / 2, RATE_HZ, mel_scale="htk")
    return torch.from_numpy(bank.T).float()


def _read(file: Path) -> dict[str, Tensor]:
    tensors = read_torch_file(file)
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise BadInputError(f"{file} has more than tensors")
    return {name: tensor.float() for name, tensor in tensors.items()}
