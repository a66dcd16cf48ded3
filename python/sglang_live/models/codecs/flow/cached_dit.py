"""Step-Audio 2's estimator: a transformer that keeps keys and values of each step of the flow.

Attention has no positions, so that it does not matter in which order keys are kept. Convolutions
see the columns before their own.
Source: stepfun-ai/Step-Audio2 (cosyvoice2/flow/decoder_dit.py), arXiv:2507.16632;
arXiv:2212.09748. There, what is kept is the model's, so that two streams that take turns have
another sound than alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.codecs.flow.layers import CausalConv, Linear, Norm, split_heads
from sglang_live.models.codecs.snac import Weights

# Columns of the prompt's end that stay, besides as many as the prompt has.
KEPT_COLUMNS = 100


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """Of one stream, in one step of the flow: once guided, and once not.

    keys: and values, [2, 2, n_heads, n, head_dim]; those of the newest chunk first.
    first, second: [2, n, width], the last columns that each convolution has seen.
    """

    keys: Tensor
    first: Tensor
    second: Tensor


Step = tuple[LayerState, ...]


class CachedDiT:
    def __init__(self, weights: Weights, name: str):
        self._times = tuple(Linear(weights, f"{name}.t_embedder.mlp.{i}") for i in (0, 2))
        self._in = Linear(weights, f"{name}.in_proj")
        n_layers = weights.count(f"{name}.blocks")
        self._layers = [_Layer(weights, f"{name}.blocks.{i}") for i in range(n_layers)]
        self._modulation = Linear(weights, f"{name}.final_layer.adaLN_modulation.1")
        self._out = Linear(weights, f"{name}.final_layer.linear")

    def time(self, t: Tensor) -> Tensor:
        """[n_times, width] of [n_times] in [0, 1], for __call__."""
        wide, out = self._times
        half = wide.weight.shape[1] // 2
        rates = torch.exp(torch.arange(half, device=t.device) * -(math.log(10_000) / half))
        angles = 1000 * t[:, None] * rates.to(t.dtype)
        waves = torch.cat((angles.cos(), angles.sin()), 1).to(wide.weight.dtype)
        return F.silu(out(F.silu(wide(waves))))

    def nothing(self) -> Step:
        """The state before a stream."""
        return tuple(layer.nothing() for layer in self._layers)

    def __call__(
        self,
        x: Tensor,
        time: Tensor,
        lengths: Sequence[int],
        most: Sequence[int | None],
        states: Sequence[Step],
    ) -> tuple[Tensor, list[Step]]:
        """
        Args:
            x: [2 * n_streams, n_columns, channels]: mel, what the encoder says, speaker and prompt;
                of all streams guided, and then of all not.
            time: [1, width].
            lengths: columns of each stream.
            most: of it, that are kept beside KEPT_COLUMNS. None: all.
            states: of this step.
        Returns:
            [2 * n_streams, n_columns, n_mels], and the states behind.
        """
        x = self._in(x)
        kept: list[list[LayerState]] = [[] for _ in lengths]
        for i, layer in enumerate(self._layers):
            x, found = layer(x, time, lengths, most, [state[i] for state in states])
            for each, state in zip(kept, found, strict=True):
                each.append(state)
        shift, scale = self._modulation(time).chunk(2, 1)
        return self._out(_modulated(x, shift, scale)), [tuple(each) for each in kept]


class _Layer:
    def __init__(self, weights: Weights, name: str):
        self._modulation = Linear(weights, f"{name}.adaLN_modulation.1")
        self._q, self._k, self._v, self._out = (
            Linear(weights, f"{name}.attn.{part}") for part in ("to_q", "to_k", "to_v", "proj")
        )
        self._q_norm, self._k_norm = (Norm(weights, f"{name}.attn.{x}_norm") for x in "qk")
        self._head_dim = weights.take(f"{name}.attn.q_norm.weight").shape[0]
        self._first, self._second = (CausalConv(weights, f"{name}.conv.block.{i}") for i in (1, 6))
        self._norm = Norm(weights, f"{name}.conv.block.3")
        self._wide, self._narrow = (Linear(weights, f"{name}.mlp.fc{i}") for i in (1, 2))

    def nothing(self) -> LayerState:
        n_heads = self._k.weight.shape[0] // self._head_dim
        keys = self._k.weight.new_zeros(2, 2, n_heads, 0, self._head_dim)
        first, second = (conv.nothing().repeat(2, 1, 1) for conv in (self._first, self._second))
        return LayerState(keys, first, second)

    def __call__(
        self,
        x: Tensor,
        time: Tensor,
        lengths: Sequence[int],
        most: Sequence[int | None],
        states: list[LayerState],
    ) -> tuple[Tensor, list[LayerState]]:
        """See CachedDiT."""
        of_attention, of_wide, of_conv = self._modulation(time).chunk(3, 1)
        shift, scale, gate = of_attention.chunk(3, 1)
        found, keys = self._attend(_modulated(x, shift, scale), lengths, states)
        x = x + gate * found
        shift, scale, gate = of_conv.chunk(3, 1)
        found, firsts, seconds = self._convolve(_modulated(x, shift, scale), lengths, states)
        x = x + gate * found
        shift, scale, gate = of_wide.chunk(3, 1)
        inner = F.gelu(self._wide(_modulated(x, shift, scale)), approximate="tanh")
        x = x + gate * self._narrow(inner)
        kept = (_kept(each, n) for each, n in zip(keys, most, strict=True))
        return x, list(map(LayerState, kept, firsts, seconds))

    def _attend(
        self, x: Tensor, lengths: Sequence[int], states: list[LayerState]
    ) -> tuple[Tensor, list[Tensor]]:
        """Each column sees all that are kept, and all of its chunk. Streams attend one by one: so
        no mask is needed, and nothing is padded."""
        query, key, value = (
            split_heads(part(x), self._head_dim).unflatten(0, (2, -1))
            for part in (self._q, self._k, self._v)
        )
        query, key = self._q_norm(query), self._k_norm(key)
        found, keys = torch.zeros_like(query), []
        for i, (n, state) in enumerate(zip(lengths, states, strict=True)):
            fresh = torch.stack((key[:, i, :, :n], value[:, i, :, :n]))
            joined = torch.cat((fresh, state.keys), 3)
            keys.append(joined)
            found[:, i, :, :n] = F.scaled_dot_product_attention(query[:, i, :, :n], *joined)
        return self._out(found.flatten(0, 1).transpose(1, 2).flatten(2)), keys

    def _convolve(
        self, x: Tensor, lengths: Sequence[int], states: list[LayerState]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        first = torch.stack([state.first for state in states], 1)
        second = torch.stack([state.second for state in states], 1)
        y = F.mish(self._norm(self._first(x, first.flatten(0, 1))))
        found = self._second(y, second.flatten(0, 1))
        return found, _last(first, x, lengths), _last(second, y, lengths)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[2:], eps=1e-6) * (1 + scale) + shift


def _kept(keys: Tensor, n: int | None) -> Tensor:
    """As the reference cuts them: the newest ones, as many as the prompt has, and the last ones of
    the prompt."""
    if n is None or keys.shape[3] <= n + KEPT_COLUMNS:
        return keys
    return torch.cat((keys[..., :n, :], keys[..., -KEPT_COLUMNS:, :]), 3)


def _last(before: Tensor, x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Of each stream the last columns, as many as `before` has: [2, n_streams, n, width]."""
    n = before.shape[2]
    joined = torch.cat((before, x.unflatten(0, (2, -1))), 2)
    # Copies: views would keep the batch alive.
    return [joined[:, i, length : length + n].clone() for i, length in enumerate(lengths)]
