"""The U-Net of several levels that estimates which way the mel flows: CosyVoice 1's.

Its convolutions are centred and its norms are over all columns, so that every column depends on the
whole stream, and only streams of equal length share a batch.
Source: FunAudioLLM/CosyVoice (flow/decoder.py: ConditionalDecoder), Matcha-TTS, arXiv:2309.03199.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.codecs.flow.estimator import TransformerLayer
from sglang_live.models.codecs.flow.layers import Linear, embedded_time
from sglang_live.models.codecs.snac import Weights

_N_GROUPS = 8


class WholeEstimator:
    def __init__(self, weights: Weights, name: str):
        self._times = tuple(Linear(weights, f"{name}.time_mlp.linear_{i}") for i in (1, 2))
        self._downs = _levels(weights, f"{name}.down_blocks", partial(Conv, stride=2))
        n_mid = weights.count(f"{name}.mid_blocks")
        self._mid = [_Stage(weights, f"{name}.mid_blocks.{i}") for i in range(n_mid)]
        self._ups = _levels(weights, f"{name}.up_blocks", _Up)
        self._last = _block(weights, f"{name}.final_block.block")
        self._out = Conv(weights, f"{name}.final_proj")

    def time(self, t: Tensor) -> Tensor:
        """[n_times, width] of [n_times] in [0, 1], for __call__."""
        return embedded_time(t, *self._times)

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        """
        Args:
            x: [n, channels, n_columns]: mel, what the encoder says, speaker and prompt.
            time: [1, width].
        Returns:
            [n, n_mels, n_columns].
        """
        kept = []
        for stage, shorter in self._downs:
            x = stage(x, time)
            kept.append(x)
            x = shorter(x)
        for stage in self._mid:
            x = stage(x, time)
        for stage, longer in self._ups:
            same = kept.pop()
            x = longer(stage(torch.cat((x[..., : same.shape[2]], same), 1), time))
        return self._out(self._last(x))


class Conv:
    """Centred."""

    def __init__(self, weights: Weights, name: str, stride: int = 1):
        self._weight = weights.take(f"{name}.weight")
        self._bias = weights.take(f"{name}.bias")
        self._stride = stride

    def __call__(self, x: Tensor) -> Tensor:
        padding = self._weight.shape[2] // 2
        return F.conv1d(x, self._weight, self._bias, self._stride, padding)


class Block:
    """A convolution, a norm over groups of channels and all columns, and an activation."""

    def __init__(self, weights: Weights, conv: str, norm: str, n_groups: int):
        self._conv = Conv(weights, conv)
        self._weight = weights.take(f"{norm}.weight")
        self._bias = weights.take(f"{norm}.bias")
        self._n_groups = n_groups

    def __call__(self, x: Tensor) -> Tensor:
        return F.mish(F.group_norm(self._conv(x), self._n_groups, self._weight, self._bias))


class _Up:
    """Two columns of each."""

    def __init__(self, weights: Weights, name: str):
        self._weight = weights.take(f"{name}.weight")
        self._bias = weights.take(f"{name}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(x, self._weight, self._bias, stride=2, padding=1)


class _Stage:
    """A residual block that knows the time, and transformer layers."""

    def __init__(self, weights: Weights, name: str):
        self._first = _block(weights, f"{name}.0.block1.block")
        self._second = _block(weights, f"{name}.0.block2.block")
        self._time = Linear(weights, f"{name}.0.mlp.1")
        self._residual = Conv(weights, f"{name}.0.res_conv")
        n_layers = weights.count(f"{name}.1")
        self._layers = [TransformerLayer(weights, f"{name}.1.{i}") for i in range(n_layers)]

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self._first(x) + self._time(F.mish(time))[..., None]
        x = (self._second(hidden) + self._residual(x)).transpose(1, 2)
        for layer in self._layers:
            x = layer(x, None)
        return x.transpose(1, 2)


def _block(weights: Weights, name: str) -> Block:
    return Block(weights, f"{name}.0", f"{name}.1", _N_GROUPS)


_Step = Callable[[Tensor], Tensor]


def _levels(
    weights: Weights, name: str, other: Callable[[Weights, str], _Step]
) -> list[tuple[_Stage, _Step]]:
    """Each with what leads to the next one; behind the last is a convolution."""
    n = weights.count(name)
    stages = [_Stage(weights, f"{name}.{i}") for i in range(n)]
    steps = [other(weights, f"{name}.{i}.2.conv") for i in range(n - 1)]
    return list(zip(stages, [*steps, Conv(weights, f"{name}.{n - 1}.2")], strict=True))
