"""Layers of the flow's encoder and estimator, over tensors of a checkpoint."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.codecs.snac import Weights


class Linear:
    """With a bias, if the checkpoint has one."""

    def __init__(self, weights: Weights, name: str):
        self.weight = weights.take(f"{name}.weight")
        self.bias = weights.take(f"{name}.bias") if weights.has(f"{name}.bias") else None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n_out] of [..., n_in]."""
        return F.linear(x, self.weight, self.bias)


class Joined:
    """Linear layers of one input and of equal widths, as one product."""

    def __init__(self, weights: Weights, names: Sequence[str]):
        layers = [Linear(weights, name) for name in names]
        self._weight = torch.cat([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._n = len(layers)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., n_out] of each layer, of [..., n_in]."""
        return F.linear(x, self._weight, self._bias).chunk(self._n, -1)


class Norm:
    """Layer norm over the last dimension."""

    def __init__(self, weights: Weights, name: str, eps: float = 1e-5):
        self._weight = weights.take(f"{name}.weight")
        self._bias = weights.take(f"{name}.bias")
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class CausalConv:
    """A convolution that sees no column behind its own."""

    def __init__(self, weights: Weights, name: str, n_groups: int = 1):
        self._weight = weights.take(f"{name}.weight")
        self._bias = weights.take(f"{name}.bias")
        self._n_groups = n_groups

    def __call__(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """[n_streams, n_positions, n_out] of [n_streams, n_positions, n_in].

        before: [n_streams, n_before, n_in], the positions before these. None: zeros.
        """
        if self._weight.shape[2] == 1:
            return F.linear(x, self._weight[..., 0], self._bias)
        padded = x.transpose(1, 2)
        if before is None:
            padded = F.pad(padded, (self._weight.shape[2] - 1, 0))
        else:
            padded = torch.cat((before.transpose(1, 2), padded), 2)
        found = F.conv1d(padded, self._weight, self._bias, groups=self._n_groups)
        return found.transpose(1, 2)

    def nothing(self) -> Tensor:
        """[n_before, n_in] of zeros."""
        return self._weight.new_zeros(self._weight.shape[2] - 1, self._weight.shape[1])


def embedded_time(t: Tensor, wide: Linear, out: Linear) -> Tensor:
    """[n_times, width] of [n_times] in [0, 1]."""
    half = wide.weight.shape[1] // 2
    rates = torch.exp(torch.arange(half, device=t.device) * -(math.log(10_000) / (half - 1)))
    angles = 1000 * t[:, None] * rates
    waves = torch.cat((angles.sin(), angles.cos()), 1).to(wide.weight.dtype)
    return out(F.silu(wide(waves)))


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[n_streams, n_heads, n_positions, head_dim] of [n_streams, n_positions, width]."""
    return x.unflatten(2, (-1, head_dim)).transpose(1, 2)


def visible(lengths: Tensor, chunks: Tensor, n_positions: int) -> Tensor:
    """Which positions each one may see: those of its stream, up to the end of its chunk.

    Args:
        lengths: [n_streams], at least 1.
        chunks: [n_streams], positions of a chunk.
    Returns:
        [n_streams, 1, n_positions, n_positions] bool, on the device of `lengths`. Positions behind
        a stream's end see some, too: what sees nothing becomes no number.
    """
    at = torch.arange(n_positions, device=lengths.device)
    ends = (at // chunks[:, None] + 1) * chunks[:, None]
    ends = torch.minimum(ends, lengths[:, None])
    return (at < ends[..., None])[:, None]


def added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, of the shape of `seen`: once for all layers and steps, where
    attention would make it of the mask for each."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)
