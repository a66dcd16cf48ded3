"""Gumbel noise by seed, frame, step and id, independent of the other requests of a batch.

The noise belongs to an id, not to the id's rank among the candidates: when KV is computed again,
two nearly equal candidates can change ranks.
"""

import torch
from torch import Tensor, nn

# Entries of the table. A draw reads consecutive entries, one per id. Two draws have the same start
# with a probability of 1 / TABLE_SIZE.
TABLE_SIZE = 1 << 20


def draws_of(seed: Tensor, frame: Tensor, n_steps: int) -> Tensor:
    """Start indices in the table of a frame's steps.

    Args:
        seed: [n] int64 per stream.
        frame: [n] int64 frame index.
    Returns:
        [n, n_steps] int64.
    """
    step = torch.arange(n_steps, device=seed.device, dtype=torch.int64)
    x = (seed * 0x1000003 + frame).unsqueeze(1) * 0x9E3779B97F4A7C1 + step * 0xBF58476D1CE4E5B
    return _mixed(x) & (TABLE_SIZE - 1)


class GumbelTable(nn.Module):
    """4 MiB of noise, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        uniform = ((_mixed(torch.arange(TABLE_SIZE)) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-15, 1 - 1e-15)))
        self.register_buffer("table", gumbel.float(), persistent=False)

    def forward(self, draw: Tensor, ids: Tensor) -> Tensor:
        """draw: [n] of `draws_of`; ids: [n, k] candidates. Returns [n, k] float32."""
        return self.table[(draw.unsqueeze(1) + ids) & (TABLE_SIZE - 1)]


def _mixed(x: Tensor) -> Tensor:
    """Counter-based random 64-bit numbers: splitmix64 (Steele et al., OOPSLA 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # int64 shifts are arithmetic: mask the copies of the sign bit away.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))
