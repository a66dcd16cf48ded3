"""The U-Net of one level that estimates which way the mel flows.

Its convolutions are causal, so that only attention has to know where a stream ends.
Source: FunAudioLLM/CosyVoice (flow/decoder.py: CausalConditionalDecoder), Matcha-TTS.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow.layers import (
    CausalConv,
    Joined,
    Linear,
    Norm,
    embedded_time,
    split_heads,
)
from sglang_live.models.codecs.snac import Weights

_HEAD_DIM = 64


class Estimator:
    def __init__(self, weights: Weights, name: str):
        if weights.count(f"{name}.down_blocks") != 1:
            raise BadInputError("a flow with an estimator of several levels is not causal")
        self._times = tuple(Linear(weights, f"{name}.time_mlp.linear_{i}") for i in (1, 2))
        self._down = _Stage(weights, f"{name}.down_blocks.0")
        self._after_down = CausalConv(weights, f"{name}.down_blocks.0.2")
        n_mid = weights.count(f"{name}.mid_blocks")
        self._mid = [_Stage(weights, f"{name}.mid_blocks.{i}") for i in range(n_mid)]
        self._up = _Stage(weights, f"{name}.up_blocks.0")
        self._after_up = CausalConv(weights, f"{name}.up_blocks.0.2")
        self._last = _Block(weights, f"{name}.final_block.block")
        self._out = CausalConv(weights, f"{name}.final_proj")

    def time(self, t: Tensor) -> Tensor:
        """[n_times, width] of [n_times] in [0, 1], for __call__."""
        return embedded_time(t, *self._times)

    def __call__(self, x: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        """
        Args:
            x: [n, n_columns, channels]: mel, what the encoder says, speaker and prompt.
            time: [1, width].
            bias: [n, 1, n_columns, n_columns], see added.
        Returns:
            [n, n_columns, n_mels].
        """
        x = kept = self._down(x, time, bias)
        x = self._after_down(x)
        for stage in self._mid:
            x = stage(x, time, bias)
        x = self._up(torch.cat((x, kept), 2), time, bias)
        return self._out(self._last(self._after_up(x)))


class _Stage:
    """A residual block that knows the time, and transformer layers."""

    def __init__(self, weights: Weights, name: str):
        self._first = _Block(weights, f"{name}.0.block1.block")
        self._second = _Block(weights, f"{name}.0.block2.block")
        self._time = Linear(weights, f"{name}.0.mlp.1")
        self._residual = CausalConv(weights, f"{name}.0.res_conv")
        n_layers = weights.count(f"{name}.1")
        self._layers = [TransformerLayer(weights, f"{name}.1.{i}") for i in range(n_layers)]

    def __call__(self, x: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        hidden = self._first(x) + self._time(F.mish(time))[:, None]
        x = self._second(hidden) + self._residual(x)
        for layer in self._layers:
            x = layer(x, bias)
        return x


class _Block:
    def __init__(self, weights: Weights, name: str):
        self._conv, self._norm = CausalConv(weights, f"{name}.0"), Norm(weights, f"{name}.2")

    def __call__(self, x: Tensor) -> Tensor:
        return F.mish(self._norm(self._conv(x)))


class TransformerLayer:
    def __init__(self, weights: Weights, name: str):
        self._attention_norm = Norm(weights, f"{name}.norm1")
        self._asked = Joined(weights, [f"{name}.attn1.to_{part}" for part in "qkv"])
        self._out = Linear(weights, f"{name}.attn1.to_out.0")
        self._forward_norm = Norm(weights, f"{name}.norm3")
        self._wide = Linear(weights, f"{name}.ff.net.0.proj")
        self._narrow = Linear(weights, f"{name}.ff.net.2")

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        asked = self._asked(self._attention_norm(x))
        query, key, value = (split_heads(part, _HEAD_DIM) for part in asked)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self._out(found.transpose(1, 2).flatten(2))
        return x + self._narrow(F.gelu(self._wide(self._forward_norm(x))))
