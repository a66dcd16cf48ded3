"""Norms and rotary embeddings in few launches, where SGLang takes its operators one by one.

A step of a deep model without SGLang's kernels is a step of launches: of 96 in a layer of
Qwen3-Omni's thinker, 40 are of norms and 23 of the rotary embedding. PyTorch has a norm, and SGLang
a Triton kernel of the rotary embedding, that need one each.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def register(platform_key: str) -> None:
    """Make these the forwards of SGLang's operators on an out-of-tree platform."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding

    for kind, forward in (
        (RMSNorm, rms_norm),
        (RotaryEmbedding, rotate),
        (MRotaryEmbedding, rotate),
    ):
        BaseFusedOp.register_oot_forward(kind, forward, platform_key)


def rms_norm(
    norm: Any, x: Tensor, residual: Tensor | None = None, *args: Any, **named: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """As RMSNorm.forward_native, but the norm is of the sum that the residual becomes."""
    special = (
        norm.variance_size_override is not None,
        norm.cast_x_before_out_mul,
        norm.fp32_residual,
        norm.override_orig_dtype is not None,
        norm.weight.dtype != x.dtype,
        any(value is not None for value in (*args, *named.values())),
    )
    if any(special):
        plain: Tensor | tuple[Tensor, Tensor] = norm.forward_native(x, residual, *args, **named)
        return plain
    if residual is not None:
        x = residual = x + residual
    out = F.rms_norm(x, (norm.hidden_size,), norm.weight, norm.variance_epsilon)
    return out if residual is None else (out, residual)


def rotate(
    rope: Any, positions: Tensor, query: Tensor, key: Tensor, *args: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """As forward_native of RotaryEmbedding and MRotaryEmbedding, in the place of query and key."""
    from sglang.kernels.ops.attention.rotary_triton import triton_mrope_fused

    if any(value is not None for value in (*args, *named.values())) or query.dim() != 2:
        plain: tuple[Tensor, Tensor] = rope.forward_native(positions, query, key, *args, **named)
        return plain
    if not len(query):
        return query, key
    section = getattr(rope, "mrope_section", None)
    if positions.dim() == 1:  # of text: the same on all axes
        positions, section = positions.expand(3, -1), None
    triton_mrope_fused(
        query,
        key,
        rope.cos_sin_cache,
        positions,
        section or [rope.rotary_dim // 2, 0, 0],
        rope.head_size,
        rope.rotary_dim,
        bool(section) and rope.mrope_interleaved,
        bool(section) and rope.mrope_interleaved_glm,
        rope.is_neox_style,
        rope.axis_map if section else None,
    )
    return query, key
