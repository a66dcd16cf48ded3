"""The vocoder's sliding-window transformer over streams of different ages.

In: embeddings of one chunk and each layer's window of past keys and values.
Out: hidden states, and the keys and values of the chunk. Owner: FrameDecoder.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_live.models.speech_lm.code2wav_layers import Place


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Inputs that all layers share for one chunk.

    Attributes:
        mask: [n_streams or 1, 1, n_new, n_past + n_new] bool, or None when all is visible.
        cos, sin: [n_new, head_dim], the rotation of the chunk's own positions.
    """

    mask: Tensor | None
    cos: Tensor
    sin: Tensor


class WindowTransformer:
    """All transformer layers and the final norm.

    Keys are kept unrotated, and positions are counted from the start of the window. Attention
    sees only differences of positions, so this equals positions counted from the start of the
    stream, without their float32 rounding in sessions that last for hours, and one table serves
    streams of all ages.
    """

    def __init__(self, module: nn.Module, place: Place):
        config = module.config
        if config.rope_parameters["rope_type"] != "default":
            raise ValueError(f"unsupported rope_type {config.rope_parameters['rope_type']!r}")
        self.n_layers = config.num_hidden_layers
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = module.layers[0].self_attn.head_dim
        self.n_window_frames = config.sliding_window
        self._layers = [_Layer(layer, place) for layer in module.layers[: self.n_layers]]
        self._norm, self._eps = place(module.norm.weight), config.rms_norm_eps
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequency = config.rope_parameters["rope_theta"] ** -exponent
        self._frequency = frequency.to(self._norm.device)

    def __call__(
        self, hidden: Tensor, past: Tensor, first_real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the chunk through all layers.

        Args:
            hidden: [n_streams, n_new, hidden_size].
            past: [n_streams, n_layers, 2 * n_kv_heads, n_past, head_dim], keys before values,
                oldest first, padded on the left for streams with fewer than n_past frames.
            first_real: [n_streams], index of the first of the n_past that is not padding. None:
                no stream is padded.
        Returns:
            hidden states like `hidden`, and the chunk's keys and values,
            [n_streams, n_layers, 2 * n_kv_heads, n_new, head_dim].
        """
        n_new, n_past = hidden.shape[1], past.shape[3]
        cos, sin = self._rotation(n_past + n_new, hidden)
        chunk = _Chunk(
            self._mask(n_past, n_new, first_real, hidden.device), cos[n_past:], sin[n_past:]
        )
        past_k, past_v = past.split(self.n_kv_heads, dim=2)
        past_k = _rotate(past_k, cos[:n_past], sin[:n_past])
        fresh = []
        for i, layer in enumerate(self._layers):
            hidden, kv = layer(hidden, past_k[:, i], past_v[:, i], chunk)
            fresh.append(kv)
        hidden = F.rms_norm(hidden, self._norm.shape, self._norm, self._eps)
        return hidden, torch.stack(fresh, dim=1)

    def _rotation(self, n_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(n_positions, dtype=torch.float32, device=like.device)
        angle = torch.outer(positions, self._frequency).repeat(1, 2)
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)

    def _mask(
        self, n_past: int, n_new: int, first_real: Tensor | None, device: torch.device
    ) -> Tensor | None:
        if n_new == 1 and first_real is None:
            return None  # past never exceeds the window, so one new frame sees all of it
        key = torch.arange(n_past + n_new, device=device)
        query = key[n_past:, None]
        visible = (key <= query) & (key > query - self.n_window_frames)
        if first_real is None:
            return visible[None, None]
        return (visible & (key >= first_real[:, None, None]))[:, None]


class _Layer:
    """One transformer layer, with norm weights and layer scales folded into its matrices."""

    def __init__(self, module: nn.Module, place: Place):
        attention, mlp = module.self_attn, module.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([projection.weight for projection in projections])
        self._qkv = place(qkv * module.input_layernorm.weight)
        has_bias = attention.q_proj.bias is not None
        self._qkv_bias = place(torch.cat([p.bias for p in projections])) if has_bias else None
        scale = module.self_attn_layer_scale.scale
        self._out = place(scale[:, None] * attention.o_proj.weight)
        self._out_bias = place(scale * attention.o_proj.bias) if has_bias else None
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self._gate_up = place(gate_up * module.post_attention_layernorm.weight)
        self._down = place(module.mlp_layer_scale.scale[:, None] * mlp.down_proj.weight)
        self._act = mlp.act_fn
        self._head_dim = attention.head_dim
        self._n_kv_heads = attention.k_proj.out_features // attention.head_dim
        self._n_heads = attention.q_proj.out_features // attention.head_dim
        self._eps = module.input_layernorm.variance_epsilon

    def __call__(
        self, hidden: Tensor, past_k: Tensor, past_v: Tensor, chunk: _Chunk
    ) -> tuple[Tensor, Tensor]:
        """hidden: [n_streams, n_new, hidden_size]; past_k (rotated) and past_v:
        [n_streams, n_kv_heads, n_past, head_dim]. Returns hidden and the chunk's unrotated keys
        and values, [n_streams, 2 * n_kv_heads, n_new, head_dim].
        """
        qkv = F.linear(_normed(hidden, self._eps), self._qkv, self._qkv_bias)
        qkv = qkv.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
        n_kv = self._n_kv_heads
        qk = _rotate(qkv[:, :-n_kv], chunk.cos, chunk.sin)
        attended = F.scaled_dot_product_attention(
            qk[:, :-n_kv],
            torch.cat((past_k, qk[:, -n_kv:]), dim=2),
            torch.cat((past_v, qkv[:, -n_kv:]), dim=2),
            attn_mask=chunk.mask,
            enable_gqa=n_kv != self._n_heads,
        )
        attended = attended.transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(attended, self._out, self._out_bias)
        gate, up = F.linear(_normed(hidden, self._eps), self._gate_up).chunk(2, dim=-1)
        return hidden + F.linear(self._act(gate) * up, self._down), qkv[:, self._n_heads :]


def _normed(x: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last dimension; the norm's weight is folded into the next matrix."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE, halves convention. x: [..., n, head_dim]; cos, sin: [n, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
