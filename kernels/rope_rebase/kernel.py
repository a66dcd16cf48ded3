"""Rotate keys back in place: one Triton program per row and block of heads."""

from functools import cache

import torch
from torch import Tensor

from sglang_live.kernels.rope_rebase import reference

# Pairs of elements per program, if a row has as many: 4 per thread.
PAIRS_PER_PROGRAM = 512
FLOATS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def rebase_keys(
    keys: Tensor, rows: Tensor, delta: int, inv_freq: Tensor, *, neox: bool, rotary_dim: int
) -> None:
    """Make keys of tokens at positions p the keys of the same tokens at p - delta.

    RoPE rotates each pair of elements by position * frequency, so rotating back by
    delta * frequency is sufficient; elements beyond rotary_dim do not depend on the position.
    Under M-RoPE a pair's position is the token's time, height or width coordinate. All three move
    by delta, so every pair is rotated by the same angle as under RoPE.

    Computed in float32, rounded to the keys' dtype, and clamped to its range. The scale of fp8
    keys is unchanged.

    Args:
        keys: [n_slots, n_heads, head_dim], a dtype of FLOATS; one layer's buffer, changed in
            place. Its last stride is 1, the others are free.
        rows: [n_rows] int64, same device, without duplicates.
        delta: positions to subtract.
        inv_freq: [rotary_dim / 2] float32, same device; of the model's rotary embedding.
        neox: pairs are elements (i, i + rotary_dim / 2); otherwise (2i, 2i + 1), as in GPT-J.
        rotary_dim: even, at most head_dim.
    Raises:
        ValueError: if shape, dtype, device or stride disagree. Values are unchecked.
    """
    _check(keys, rows, inv_freq, rotary_dim)
    if delta == 0 or rows.numel() == 0:
        return
    if keys.device.type == "cuda":
        _launch(keys, rows, *reference.rotation(delta, inv_freq), neox=neox)
    else:
        reference.rebase_keys(keys, rows, delta, inv_freq, neox=neox, rotary_dim=rotary_dim)


def _check(keys: Tensor, rows: Tensor, inv_freq: Tensor, rotary_dim: int) -> None:
    if keys.dim() != 3 or keys.dtype not in FLOATS or keys.stride(2) != 1:
        raise ValueError(
            "keys must be [n_slots, n_heads, head_dim] of a float dtype with last stride 1, got "
            f"{tuple(keys.shape)} {keys.dtype} with strides {keys.stride()}"
        )
    if rotary_dim % 2 or not 0 < rotary_dim <= keys.shape[2]:
        raise ValueError(f"rotary_dim {rotary_dim} must be even and within {keys.shape[2]}")
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise ValueError(f"rows must be [n_rows] int64, got {tuple(rows.shape)} {rows.dtype}")
    if inv_freq.shape != (rotary_dim // 2,) or inv_freq.dtype != torch.float32:
        raise ValueError(
            f"inv_freq must be [{rotary_dim // 2}] float32, "
            f"got {tuple(inv_freq.shape)} {inv_freq.dtype}"
        )
    if not keys.device == rows.device == inv_freq.device:
        raise ValueError(f"devices differ: {keys.device}, {rows.device}, {inv_freq.device}")


def _launch(keys: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, *, neox: bool) -> None:
    n_heads, n_pairs = keys.shape[1], cos.numel()
    pair_block = _power_of_two(n_pairs)
    head_block = min(_power_of_two(n_heads), max(1, PAIRS_PER_PROGRAM // pair_block))
    _jit()[(rows.numel(), -(-n_heads // head_block))](
        keys,
        rows.contiguous(),
        cos,
        sin,
        keys.stride(0),
        keys.stride(1),
        n_heads,
        torch.finfo(keys.dtype).max,
        N_PAIRS=n_pairs,
        PAIR_BLOCK=pair_block,
        HEAD_BLOCK=head_block,
        NEOX=neox,
    )


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@cache
def _jit():
    global tl  # Triton resolves names among the module's globals
    import triton
    import triton.language as tl

    @triton.jit
    def rotate_back(
        keys,
        rows,
        cos,
        sin,
        slot_stride,
        head_stride,
        n_heads,
        limit,
        N_PAIRS: tl.constexpr,
        PAIR_BLOCK: tl.constexpr,
        HEAD_BLOCK: tl.constexpr,
        NEOX: tl.constexpr,
    ):
        row = tl.load(rows + tl.program_id(0))
        heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        pairs = tl.arange(0, PAIR_BLOCK)
        c = tl.load(cos + pairs, pairs < N_PAIRS, other=1.0)[None, :]
        s = tl.load(sin + pairs, pairs < N_PAIRS, other=0.0)[None, :]
        mask = (heads < n_heads)[:, None] & (pairs < N_PAIRS)[None, :]
        # row is int64: a buffer may have more elements than int32 can index.
        head = keys + row * slot_stride + heads[:, None] * head_stride
        first = head + (pairs if NEOX else 2 * pairs)[None, :]
        second = first + (N_PAIRS if NEOX else 1)
        x = tl.load(first, mask, other=0.0).to(tl.float32)
        y = tl.load(second, mask, other=0.0).to(tl.float32)
        turned_x = tl.minimum(tl.maximum(x * c - y * s, -limit), limit)
        turned_y = tl.minimum(tl.maximum(y * c + x * s, -limit), limit)
        tl.store(first, turned_x.to(keys.dtype.element_ty), mask)
        tl.store(second, turned_y.to(keys.dtype.element_ty), mask)

    return rotate_back
