"""Where the pages that another runtime lends hold a borrower's tokens.

A lease is a run of the lender's slots. In each of the lender's buffers the run is one range of
bytes. The range is cut into the borrower's envelopes: all layers of one token, first K, then V. An
envelope may begin at any multiple of UNIT_BYTES, and that multiple is its slot number. So neither
model's layout matters to the other, and nothing is copied to lend a page.
Pure: byte offsets in, slot numbers out. Source: SwiftCache, section 4.2, without its LCM unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A cache line; kernels copy 16 bytes at once. Rows of a KV pool begin at such a multiple.
UNIT_BYTES = 64
# Types without scales or packing: a token's KV is its bytes.
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LAYOUT = "nhd"

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """An engine's KV pool on one rank, which has its own heads.

    Attributes:
        dtype: of the stored KV, such as bfloat16.
        layout: of a buffer; "nhd": one row per slot, [heads, head_dim].
        k_dim, v_dim: of a head.
    """

    dtype: str
    layout: str
    n_layers: int
    n_heads: int
    k_dim: int
    v_dim: int
    page_size: int

    @property
    def item_bytes(self) -> int:
        return _DTYPES[self.dtype]

    @property
    def k_items(self) -> int:
        """Elements of K of one token, all layers."""
        return self.n_layers * self.n_heads * self.k_dim

    @property
    def v_items(self) -> int:
        return self.n_layers * self.n_heads * self.v_dim

    @property
    def envelope_bytes(self) -> int:
        return (self.k_items + self.v_items) * self.item_bytes

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one slot in each buffer: K of each layer, then V of each layer."""
        k, v = (self.n_heads * dim * self.item_bytes for dim in (self.k_dim, self.v_dim))
        return (k,) * self.n_layers + (v,) * self.n_layers


def refusal(geometry: Geometry) -> str | None:
    """Why a pool of this geometry can neither lend nor borrow; None if it can."""
    if geometry.dtype not in _DTYPES:
        return f"dtype: {geometry.dtype} has scales or packing that a copy of rows would lose"
    if geometry.layout != _LAYOUT:
        return f"layout: {geometry.layout} has no row per slot"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A lender's buffers in one mapping.

    Attributes:
        kind: of the device that has it, such as cuda; a borrower's must be the same.
        offsets: of each buffer's slot 0, in bytes, ascending.
        row_bytes: of one slot in each buffer.
        n_bytes: of the mapping.
    """

    kind: str = "cpu"
    offsets: tuple[int, ...]
    row_bytes: tuple[int, ...]
    n_bytes: int

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.row_bytes) or not self.offsets:
            raise ValueError(f"{len(self.offsets)} offsets for {len(self.row_bytes)} buffers")

    def ranges(self, first: int, n_slots: int) -> list[tuple[int, int]]:
        """The byte ranges [begin, end) of a run of slots, one per buffer."""
        spans = [
            (offset + first * row, offset + (first + n_slots) * row)
            for offset, row in zip(self.offsets, self.row_bytes, strict=True)
        ]
        if first < 0 or n_slots < 1 or max(end for _, end in spans) > self.n_bytes:
            raise ValueError(f"slots {first} to {first + n_slots} are not in the mapping")
        return spans


def slots_in(ranges: Sequence[tuple[int, int]], envelope_bytes: int) -> Slots:
    """Slot numbers of all envelopes that fit into byte ranges, in the order of the ranges."""
    step = units_of(envelope_bytes)
    found = []
    for begin, end in ranges:
        first = units_of(begin)
        n = (end - first * UNIT_BYTES - envelope_bytes) // (step * UNIT_BYTES) + 1
        found.append(first + step * np.arange(max(0, n), dtype=np.int64))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def units_of(n_bytes: int) -> int:
    """Units that contain n_bytes."""
    return -(-n_bytes // UNIT_BYTES)


def n_rows(mapping_bytes: int, envelope_bytes: int) -> int:
    """Rows of a view of a mapping that has a row, one envelope long, at every unit."""
    return max(0, (mapping_bytes - envelope_bytes) // UNIT_BYTES + 1)
