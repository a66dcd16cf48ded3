"""The hash of seeded sampling equals MurmurHash3, written out with Python's integers."""

import random

import torch

from sglang_live.bridge.platform.cpu_seeds import murmur_hash32

MASK = 0xFFFF_FFFF


def expected(seed: int, position: int, column: int) -> int:
    data = (seed & (2**64 - 1)).to_bytes(8, "little")
    data += position.to_bytes(4, "little") + column.to_bytes(4, "little")
    h = 0
    for at in range(0, len(data), 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & MASK
        k = (k << 15 | k >> 17) & MASK
        h ^= k * 0x1B873593 & MASK
        h = (h << 13 | h >> 19) & MASK
        h = (h * 5 + 0xE6546B64) & MASK
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def test_every_column_equals_the_hash_of_its_bytes():
    rng = random.Random(5)
    seeds = [0, 1, 2**63 - 1, *(rng.randrange(2**63) for _ in range(5))]
    positions = [rng.randrange(2**17) for _ in seeds]
    columns = torch.tensor([0, 1, 7, 156_939])
    found = murmur_hash32(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), columns
    ).to(torch.int64)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert found[row].tolist() == [expected(seed, position, c) for c in columns.tolist()]
