"""CosyVoice 3's estimator: a transformer whose layers are scaled and shifted by the time.

Its positions are rotations of the first head alone, as in the reference and the model before it.
Source: FunAudioLLM/CosyVoice (flow/DiT), which is from F5-TTS, arXiv:2410.06885; arXiv:2212.09748.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.codecs.flow.layers import (
    CausalConv,
    Joined,
    Linear,
    embedded_time,
    split_heads,
)
from sglang_live.models.codecs.snac import Weights

_HEAD_DIM = 64
_N_GROUPS = 16  # of the convolutions
_ROPE_BASE = 10_000.0


class DiT:
    def __init__(self, weights: Weights, name: str):
        self._times = tuple(Linear(weights, f"{name}.time_embed.time_mlp.{i}") for i in (0, 2))
        self._in = Linear(weights, f"{name}.input_embed.proj")
        # The reference has the prompt before what the encoder says and the speaker.
        x, prompt, said, speaker = self._in.weight.chunk(4, 1)
        self._in.weight = torch.cat((x, said, speaker, prompt), 1)
        convs = f"{name}.input_embed.conv_pos_embed"
        self._places = [CausalConv(weights, f"{convs}.conv{i}.0", _N_GROUPS) for i in (1, 2)]
        n_layers = weights.count(f"{name}.transformer_blocks")
        self._layers = [_Layer(weights, f"{name}.transformer_blocks.{i}") for i in range(n_layers)]
        self._modulation = Linear(weights, f"{name}.norm_out.linear")
        self._out = Linear(weights, f"{name}.proj_out")

    def time(self, t: Tensor) -> Tensor:
        """See Estimator."""
        return F.silu(embedded_time(t, *self._times))

    def __call__(self, x: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        """See Estimator."""
        x = placed = self._in(x)
        for conv in self._places:
            placed = F.mish(conv(placed))
        x = x + placed
        turns = _turns(x.shape[1], x.device).to(x.dtype)
        for layer in self._layers:
            x = layer(x, time, bias, turns)
        scale, shift = self._modulation(time).chunk(2, 1)
        return self._out(_modulated(x, scale, shift))


class _Layer:
    def __init__(self, weights: Weights, name: str):
        self._modulation = Linear(weights, f"{name}.attn_norm.linear")
        self._asked = Joined(weights, [f"{name}.attn.to_{part}" for part in "qkv"])
        self._out = Linear(weights, f"{name}.attn.to_out.0")
        self._wide = Linear(weights, f"{name}.ff.ff.0.0")
        self._narrow = Linear(weights, f"{name}.ff.ff.2")

    def __call__(self, x: Tensor, time: Tensor, bias: Tensor, turns: Tensor) -> Tensor:
        shift, scale, gate, forward_shift, forward_scale, forward_gate = self._modulation(
            time
        ).chunk(6, 1)
        asked = self._asked(_modulated(x, scale, shift))
        query, key, value = (split_heads(part, _HEAD_DIM) for part in asked)
        query, key = _first_rotated(query, turns), _first_rotated(key, turns)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + gate * self._out(found.transpose(1, 2).flatten(2))
        inner = F.gelu(self._wide(_modulated(x, forward_scale, forward_shift)), approximate="tanh")
        return x + forward_gate * self._narrow(inner)


def _modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[2:], eps=1e-6) * (1 + scale) + shift


def _turns(n: int, device: torch.device) -> Tensor:
    """[2, n, _HEAD_DIM]: cosines and sines of each position, each twice in a row."""
    rates = _ROPE_BASE ** -(torch.arange(0, _HEAD_DIM, 2, device=device) / _HEAD_DIM)
    angles = (torch.arange(n, device=device)[:, None] * rates).repeat_interleave(2, 1)
    return torch.stack((angles.cos(), angles.sin()))


def _first_rotated(x: Tensor, turns: Tensor) -> Tensor:
    """[n_streams, n_heads, n_positions, _HEAD_DIM], the first head by its positions."""
    first, others = x[:, :1], x[:, 1:]
    even, odd = first.unflatten(3, (-1, 2)).unbind(4)
    crossed = torch.stack((-odd, even), 4).flatten(3)
    return torch.cat((first * turns[0] + crossed * turns[1], others), 1)
