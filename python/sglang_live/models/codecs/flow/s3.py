"""S3, which hears speech as codes of 40 ms: attention with memory of what is near, and a quantizer
of eight values of three levels.

Computed in float32, on the CPU. Its sizes are those of its weights.
Source: xingchensong/S3Tokenizer (model_v2.py, Apache-2.0); arXiv:2412.10117.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

_HEAD_DIM, _THETA = 64, 10_000.0
_LEVELS, _NEARLY_ONE = 3, 0.9990000128746033


class S3:
    """tensors: by their names in the reference's tokenizer."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    @torch.inference_mode()
    def codes(self, mels: Tensor) -> Tensor:
        """[n_codes] int64 of [n_mels, n_frames] (log_mel.py); four frames, or a rest, have one.

        Raises:
            KeyError, RuntimeError: a weight is missing, or does not fit the others.
        """
        x = mels[None]
        for name in ("encoder.conv1", "encoder.conv2"):
            x = F.gelu(F.conv1d(x, *self._layer(name), stride=2, padding=1))
        x = x[0].T
        turned = _turns(len(x))
        n = 0
        while f"encoder.blocks.{n}.attn_ln.weight" in self._tensors:
            x = self._block(f"encoder.blocks.{n}", x, turned)
            n += 1
        values = F.linear(x, *self._layer("quantizer._codebook.project_down")).tanh()
        levels = (values * _NEARLY_ONE).round().long() + 1
        return (levels * _LEVELS ** torch.arange(levels.shape[1])).sum(dim=1)

    def _block(self, name: str, x: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self._attended(f"{name}.attn", self._normed(f"{name}.attn_ln", x), turned)
        wide = F.gelu(F.linear(self._normed(f"{name}.mlp_ln", x), *self._layer(f"{name}.mlp.0")))
        return x + F.linear(wide, *self._layer(f"{name}.mlp.2"))

    def _attended(self, name: str, x: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            F.linear(x, *self._layer(f"{name}.{part}")) for part in ("query", "key", "value")
        )
        heads = [part.unflatten(1, (-1, _HEAD_DIM)).transpose(0, 1) for part in (query, key, value)]
        found = F.scaled_dot_product_attention(
            _rotated(heads[0], turned), _rotated(heads[1], turned), heads[2]
        )
        near = self._tensors[f"{name}.fsmn_block.weight"]
        n_before = (near.shape[2] - 1) // 2
        padded = F.pad(value.T[None], (n_before, near.shape[2] - 1 - n_before))
        memory = F.conv1d(padded, near, groups=len(near))[0].T + value
        return F.linear(found.transpose(0, 1).flatten(1), *self._layer(f"{name}.out")) + memory

    def _layer(self, name: str) -> tuple[Tensor, Tensor | None]:
        # Keys have no bias.
        return self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")

    def _normed(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._layer(name)
        return F.layer_norm(x, weight.shape, weight, bias)


def _turns(n: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [n, _HEAD_DIM]."""
    rates = _THETA ** -(torch.arange(0, _HEAD_DIM, 2).float() / _HEAD_DIM)
    angles = torch.outer(torch.arange(n).float(), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * turned[0] + torch.cat((-second, first), dim=-1) * turned[1]
