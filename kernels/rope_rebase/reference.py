"""The kernel's reference in plain PyTorch."""

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
    # A rotated element can exceed both of its inputs, and so the range of fp8.
    limit = torch.finfo(keys.dtype).max
    keys[rows] = moved.clamp(-limit, limit).to(keys.dtype)


def rotation(delta: int, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [rotary_dim / 2] float32, of a rotation back by `delta` positions."""
    # In float32 the angle of 60,000 positions would err by up to 2e-3 radians.
    angle = -delta * inv_freq.double()
    return angle.cos().float(), angle.sin().float()
