"""SGLang's hash for seeded sampling, in PyTorch: MurmurHash3 of seed, position and column.

Source: sglang.kernels.ops.sampling.murmur_hash, whose kernels need Triton or sgl-kernel.
"""

import torch
from torch import Tensor

_MASK = 0xFFFF_FFFF
# Bytes of seed (8), position (4) and column (4).
_N_BYTES = 16


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """
    Args:
        seed: [n] uint64.
        positions: [n].
        col_indices: [m].
    Returns:
        [n, m] uint32.
    """
    # uint64 has few operations on a CPU; int64 has the same bits, and only low halves are used.
    seed = seed.view(torch.int64)
    row = torch.zeros_like(seed)
    for block in (seed, seed >> 32, positions.to(torch.int64)):
        row = _mixed(row, block & _MASK)
    hashed = _mixed(row.unsqueeze(1), col_indices.to(torch.int64).unsqueeze(0)) ^ _N_BYTES
    for shift, factor in ((16, 0x85EB_CA6B), (13, 0xC2B2_AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _MASK
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _mixed(hashed: Tensor, block: Tensor) -> Tensor:
    block = (_rotated((block * 0xCC9E_2D51) & _MASK, 15) * 0x1B87_3593) & _MASK
    return (_rotated(hashed ^ block, 13) * 5 + 0xE654_6B64) & _MASK


def _rotated(x: Tensor, n: int) -> Tensor:
    return ((x << n) | (x >> (32 - n))) & _MASK
