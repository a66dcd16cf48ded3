"""Parameter combinations under test. Copies are exact: there is no tolerance."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Defaults: a few layers of Qwen3-Omni's thinker, with its keys and values.

    page: consecutive rows; pages are at random places.
    gap: elements between the rows of a device's layer.
    """

    n_rows: int = 48
    page: int = 1
    n_layers: int = 3
    n_heads: int = 4
    head_dim: int = 128
    v_head_dim: int = 128
    gap: int = 0
    dtype: torch.dtype = torch.bfloat16


GRID = (
    Case(),
    Case(page=16),
    Case(n_rows=0),
    Case(n_rows=1, n_layers=1),
    Case(n_rows=47),  # not a multiple of the tile
    Case(n_rows=1200, n_layers=2, n_heads=1, head_dim=64, v_head_dim=64),  # several tiles each
    Case(head_dim=192),  # values are narrower than keys
    Case(n_heads=3, head_dim=80, v_head_dim=80),  # neither a power of two
    Case(gap=512),  # layers that alternate in one buffer
    Case(gap=4),  # aligned to 8 bytes
    Case(n_heads=1, head_dim=2, v_head_dim=6),  # to 4
    Case(n_heads=1, head_dim=3, v_head_dim=5),  # to 2
    Case(n_heads=1, head_dim=7, v_head_dim=7, dtype=torch.uint8),  # to 1
    Case(n_heads=32, head_dim=256, v_head_dim=256, n_rows=5),  # a row is wider than a tile
    Case(dtype=torch.float32),
    Case(dtype=torch.float8_e4m3fn),
)
