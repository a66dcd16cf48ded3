"""What the kernel computes, in plain PyTorch."""

import torch
from torch import Tensor


def rebase_keys(
    keys: Tensor, rows: Tensor, delta: int, inv_freq: Tensor, *, neox: bool, rotary_dim: int
) -> None:
    """Arguments as in kernel.py."""
    cos, sin = rotation(delta, inv_freq)
    moved = keys[rows].float()
    rotary = moved[..., :rotary_dim]
    if neox:
        first, second = rotary.chunk(2, dim=-1)
    else:
        first, second = rotary[..., ::2], rotary[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    first.copy_(turned[0])
    second.copy_(turned[1])
    # A turned element can be larger than either was, and fp8 has no room to spare.
    limit = torch.finfo(keys.dtype).max
    keys[rows] = moved.clamp(-limit, limit).to(keys.dtype)


def rotation(delta: int, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [rotary_dim / 2] float32, of the way back by `delta` positions."""
    # In float32 the angle of 60,000 positions would be off by up to 2e-3 radians.
    angle = -delta * inv_freq.double()
    return angle.cos().float(), angle.sin().float()
