"""Copy rows between memory of the device and of the host: one Triton launch for all layers.

The device reads or writes the host's memory itself, over the link. A copy engine would need one
command for each run of contiguous rows of each layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_live.kernels.kv_rows import reference

# Few, so that the forward on another stream keeps most multiprocessors. With a tile of 16 KB each,
# 512 KB are in flight; a link of 55 GB/s with 2 us of latency has 110 KB in flight.
PROGRAMS = 32
N_WARPS = 8
# Of a tile, if a row is not wider: 8 per thread, in 4 accesses if rows are aligned.
TILE_WORDS = 2048
# The widest access of a thread.
MAX_ALIGNMENT_BYTES = 16
# A pool has one for each layer that it loads, and one for all that it saves.
_MAX_LAYOUTS = 4096


class Place(NamedTuple):
    """Where one layer is, and in which form."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What the kernel needs to know of layers.

    entries: per layer: addresses of source and destination, bytes from row to row of source and of
        destination, words of a row.
    alignment_bytes: of every row on both sides.
    word_bytes: the size of the kernel's element.
    """

    entries: tuple[tuple[int, int, int, int, int], ...]
    alignment_bytes: int
    word_bytes: int


def copy_rows(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    rows: Tensor,
    *,
    n_programs: int = PROGRAMS,
) -> None:
    """Copy rows of every layer, on the current stream; the host does not wait for it.

    Layers may differ in shape and stride. Rows of source and destination may not overlap.

    Args:
        src_layers: per layer, [n_slots, ...] of any dtype. All but the first dimension are
            contiguous. On the device of `rows`, or in pinned memory of the host.
        dst_layers: as src_layers, of the same dtype and shape of a row.
        rows: [2, n_rows] int64, contiguous: slots of the source, and slots of the destination
            without duplicates.
        n_programs: of the launch, at most.
    Raises:
        ValueError: if shape, dtype, device or stride disagree, or the device cannot reach the
            memory. Values of `rows` are unchecked.
    """
    if rows.dim() != 2 or len(rows) != 2 or rows.dtype != torch.int64 or not rows.is_contiguous():
        raise ValueError(
            f"rows must be [2, n_rows] int64 and contiguous, got {tuple(rows.shape)} {rows.dtype}"
        )
    layout = _layout(tuple(map(_place, src_layers)), tuple(map(_place, dst_layers)))
    _check_reachable((*src_layers, *dst_layers), rows.device)
    if not src_layers or rows.shape[1] == 0:
        return
    if rows.device.type == "cuda":
        stream = torch.cuda.current_stream(rows.device).cuda_stream
        _launch(layout, rows, stream, n_programs)
    else:
        reference.copy_rows(src_layers, dst_layers, rows)


def _check_reachable(layers: Sequence[Tensor], device: torch.device) -> None:
    # Not cached: other memory may have the same address later.
    for layer in layers:
        if layer.device != device and not layer.is_pinned():
            raise ValueError(f"a layer in pageable memory or on {layer.device}, not on {device}")


def _place(layer: Tensor) -> Place:
    return Place(layer.data_ptr(), layer.shape, layer.stride(), layer.dtype)


@lru_cache(_MAX_LAYOUTS)
def _layout(src_layers: tuple[Place, ...], dst_layers: tuple[Place, ...]) -> Layout:
    if len(src_layers) != len(dst_layers):
        raise ValueError(f"{len(src_layers)} layers cannot be copied to {len(dst_layers)}")
    in_bytes = []
    for src, dst in zip(src_layers, dst_layers, strict=True):
        if src.dtype != dst.dtype or src.shape[1:] != dst.shape[1:]:
            raise ValueError(
                f"rows differ: {src.shape[1:]} {src.dtype} and {dst.shape[1:]} {dst.dtype}"
            )
        if not (_has_packed_rows(src) and _has_packed_rows(dst)):
            raise ValueError(
                f"rows {src.shape[1:]} must be contiguous, got strides {src.stride} and "
                f"{dst.stride}"
            )
        size = src.dtype.itemsize
        strides = size * src.stride[0], size * dst.stride[0]
        in_bytes.append((src.address, dst.address, *strides, size * math.prod(src.shape[1:])))
    alignment_bytes = math.gcd(MAX_ALIGNMENT_BYTES, *(n for entry in in_bytes for n in entry))
    word_bytes = min(8, alignment_bytes)
    entries = tuple((*entry[:4], entry[4] // word_bytes) for entry in in_bytes)
    return Layout(entries, alignment_bytes, word_bytes)


def _has_packed_rows(layer: Place) -> bool:
    expected = 1
    for size, stride in zip(reversed(layer.shape[1:]), reversed(layer.stride[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return len(layer.shape) > 0


def _launch(layout: Layout, rows: Tensor, stream: int, n_programs: int) -> None:
    n_rows = rows.shape[1]
    n_copies = len(layout.entries) * n_rows
    columns = _power_of_two(max(entry[4] for entry in layout.entries))
    tile_rows = max(1, TILE_WORDS // columns)
    programs = min(n_programs, -(-n_copies // tile_rows))
    kernel, words = _jit()
    kernel[(programs,)](
        _table(layout, rows.device, stream),
        rows,
        n_rows,
        n_copies,
        WORD=words[layout.word_bytes],
        ALIGNMENT=layout.alignment_bytes,
        COLUMNS=columns,
        ROWS=tile_rows,
        num_warps=N_WARPS,
    )


# By stream: the copy of a table comes before its use, and the end of its use before its memory is
# allocated again, only in the order of one stream.
@lru_cache(_MAX_LAYOUTS)
def _table(layout: Layout, device: torch.device, stream: int) -> Tensor:
    """The entries of a layout, [n_layers, 5] int64 on the device."""
    table = torch.tensor(layout.entries, dtype=torch.int64)
    if device.type != "cuda":
        return table
    return table.pin_memory().to(device, non_blocking=True)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


@cache
def _jit():
    """The kernel, and the dtype of its element by size in bytes."""
    global tl  # Triton resolves names among the module's globals
    import triton
    import triton.language as tl

    # A kernel for other numbers of rows would be compiled while sessions wait.
    @triton.jit(do_not_specialize=["n_rows", "n_copies"])
    def copy(
        table,
        rows,
        n_rows,
        n_copies,
        WORD: tl.constexpr,
        ALIGNMENT: tl.constexpr,
        COLUMNS: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        columns = tl.arange(0, COLUMNS)[None, :]
        for first in range(tl.program_id(0) * ROWS, n_copies, tl.num_programs(0) * ROWS):
            copies = first + tl.arange(0, ROWS)
            is_copy = copies < n_copies
            # Consecutive copies are of one layer.
            entry = table + 5 * (copies // n_rows)
            row = rows + copies % n_rows
            src = tl.load(entry, is_copy, other=0)
            dst = tl.load(entry + 1, is_copy, other=0)
            src += tl.load(row, is_copy, other=0) * tl.load(entry + 2, is_copy, other=0)
            dst += tl.load(row + n_rows, is_copy, other=0) * tl.load(entry + 3, is_copy, other=0)
            n_words = tl.load(entry + 4, is_copy, other=0)
            # The hints make two words of 8 bytes one access.
            n_words = tl.multiple_of(n_words, 8 * ALIGNMENT // WORD.primitive_bitwidth)
            mask = columns < n_words[:, None]
            src = tl.multiple_of(src.to(tl.pointer_type(WORD)), ALIGNMENT)[:, None]
            dst = tl.multiple_of(dst.to(tl.pointer_type(WORD)), ALIGNMENT)[:, None]
            # Each byte is read once: the first level's cache is left to others.
            words = tl.load(src + columns, mask, cache_modifier=".cg")
            tl.store(dst + columns, words, mask)

    return copy, {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
