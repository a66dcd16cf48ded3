"""CAM++, which hears who speaks: a residual network over a spectrogram, then layers that see all
before them, each weighted by its context.

Computed in float32, on the CPU. Its sizes are those of its weights.
Source: arXiv:2303.00332; modelscope/3D-Speaker (speakerlab/models/campplus, Apache-2.0).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

# By block of dense layers.
_DILATIONS = 1, 2, 2
# Frames of a context.
_SEGMENT = 100


class CamPlusPlus:
    """tensors: by their names in the reference."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    @torch.inference_mode()
    def embed(self, frames: Tensor) -> Tensor:
        """[n_values] of [n_frames, n_mels] (recording.speaker_frames).

        Raises:
            KeyError, RuntimeError: a weight is missing, or does not fit the others.
        """
        x = self._normed("head.bn1", self._conv2d("head.conv1", frames.T[None, None])).relu()
        for layer in ("head.layer1", "head.layer2"):
            for n in range(self._count(f"{layer}.{{}}.conv1.weight")):
                x = self._residual(f"{layer}.{n}", x, stride=1 if n else 2)
        x = self._normed("head.bn2", self._conv2d("head.conv2", x, stride=2)).relu()
        x = self._conv1d("xvector.tdnn.linear", x.flatten(1, 2), stride=2)
        x = self._active("xvector.tdnn.nonlinear", x)
        for n, dilation in enumerate(_DILATIONS, 1):
            name = f"xvector.block{n}.tdnnd{{}}"
            for i in range(1, 1 + self._count(f"{name}.linear1.weight", first=1)):
                x = torch.cat((x, self._dense(name.format(i), x, dilation)), dim=1)
            name = f"xvector.transit{n}"
            x = self._conv1d(f"{name}.linear", self._active(f"{name}.nonlinear", x))
        x = self._active("xvector.out_nonlinear", x)
        moments = torch.cat((x.mean(dim=2), x.std(dim=2)), dim=1)[:, :, None]
        dense = self._conv1d("xvector.dense.linear", moments)
        return self._normed("xvector.dense.nonlinear.batchnorm", dense)[0, :, 0]

    def _residual(self, name: str, x: Tensor, stride: int) -> Tensor:
        y = self._normed(f"{name}.bn1", self._conv2d(f"{name}.conv1", x, stride)).relu()
        y = self._normed(f"{name}.bn2", self._conv2d(f"{name}.conv2", y))
        if f"{name}.shortcut.0.weight" in self._tensors:
            x = self._normed(f"{name}.shortcut.1", self._conv2d(f"{name}.shortcut.0", x, stride))
        return (x + y).relu()

    def _dense(self, name: str, x: Tensor, dilation: int) -> Tensor:
        x = self._conv1d(f"{name}.linear1", self._active(f"{name}.nonlinear1", x))
        x = self._active(f"{name}.nonlinear2", x)
        cam = f"{name}.cam_layer"
        seen = F.avg_pool1d(x, _SEGMENT, _SEGMENT, ceil_mode=True)
        seen = seen.repeat_interleave(_SEGMENT, dim=2)[:, :, : x.shape[2]]
        context = self._conv1d(f"{cam}.linear1", x.mean(dim=2, keepdim=True) + seen).relu()
        weights = self._conv1d(f"{cam}.linear2", context).sigmoid()
        return weights * self._conv1d(f"{cam}.linear_local", x, dilation=dilation)

    def _active(self, name: str, x: Tensor) -> Tensor:
        return self._normed(f"{name}.batchnorm", x).relu()

    def _conv2d(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        """stride: over mels; none over time."""
        weight = self._tensors[f"{name}.weight"]
        return F.conv2d(x, weight, stride=(stride, 1), padding=weight.shape[2] // 2)

    def _conv1d(self, name: str, x: Tensor, stride: int = 1, dilation: int = 1) -> Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")
        padding = (weight.shape[2] - 1) // 2 * dilation
        return F.conv1d(x, weight, bias, stride, padding, dilation)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        mean, variance = (self._tensors[f"{name}.running_{part}"] for part in ("mean", "var"))
        # The last one has neither.
        weight, bias = (self._tensors.get(f"{name}.{part}") for part in ("weight", "bias"))
        return F.batch_norm(x, mean, variance, weight, bias)

    def _count(self, name: str, first: int = 0) -> int:
        """Of names that differ in a number."""
        n = first
        while name.format(n) in self._tensors:
            n += 1
        return n - first
