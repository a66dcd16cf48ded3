"""Parameter combinations under test, and the tolerance of results."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Defaults: keys of Qwen3-Omni's thinker."""

    n_rows: int = 33
    n_heads: int = 4
    head_dim: int = 128
    rotary_dim: int = 128
    neox: bool = True
    delta: int = 4096
    dtype: torch.dtype = torch.bfloat16


_SHAPES = (
    Case(),
    Case(neox=False),
    Case(n_rows=0),
    Case(n_rows=1, n_heads=1, delta=1),
    Case(delta=0),
    Case(delta=60_000),
    Case(delta=-7),
    Case(n_heads=3, head_dim=80, rotary_dim=80),  # neither a power of two
    Case(n_heads=20, head_dim=64, rotary_dim=64),  # more heads than one program takes
    Case(head_dim=192, rotary_dim=64),
    Case(head_dim=96, rotary_dim=24, neox=False),
    Case(head_dim=2, rotary_dim=2),
)
_LARGEST = (Case(n_rows=8192),)  # a long window, whole

# Elements of keys are drawn from [-1, 1], so rotated ones are below 2, where adjacent numbers
# differ by one eps: one rounding errs by half of that. The kernel itself computes in float32.
TOLERANCE = {
    torch.float32: 4 * torch.finfo(torch.float32).eps,  # fused multiply-adds differ
    torch.bfloat16: 0.51 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 0.51 * torch.finfo(torch.float16).eps,
    torch.float8_e4m3fn: 0.51 * torch.finfo(torch.float8_e4m3fn).eps,
    torch.float8_e5m2: 0.51 * torch.finfo(torch.float8_e5m2).eps,
}

GRID = (*(replace(case, dtype=dtype) for case in _SHAPES for dtype in TOLERANCE), *_LARGEST)
