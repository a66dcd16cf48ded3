"""KV buffers in memory that other processes can map (shared_memory.py).

In: a pool of plain attention. Out: its K and V buffers, and where they are in the memory.
Owner: the pool, as long as it exists.
"""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_live.extensions.lending.engine.shared_memory import SharedMemory, create


@dataclass(frozen=True, slots=True)
class KvMemory:
    """
    Attributes:
        shared: the memory, as long as the process lives.
        offsets: of each buffer, K of each layer, then V of each layer; whole pages of the machine.
        row_bytes: of one slot in each buffer.
    """

    shared: SharedMemory
    offsets: tuple[int, ...]
    row_bytes: tuple[int, ...]


def create_shared_buffers(upstream: Callable[[Any], None], pool: Any) -> None:
    """In the place of MHATokenToKVPool._create_buffers_normal, where the pool's layout allows."""
    if pool.kv_cache_layout != "nhd":
        upstream(pool)
        return
    k_shape, v_shape = pool._kv_buffer_shapes()
    shapes = [k_shape] * pool.layer_num + [v_shape] * pool.layer_num
    memory, buffers = shared_buffers(shapes, pool.store_dtype, torch.device(pool.device))
    pool.k_buffer = buffers[: pool.layer_num]
    pool.v_buffer = buffers[pool.layer_num :]
    pool.kv_memory = memory


def shared_buffers(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[KvMemory, list[torch.Tensor]]:
    """Zeroed buffers in new memory.

    Args:
        shapes: of each buffer; the first dimension is slots.
    """
    rows = [torch.Size(shape[1:]).numel() * dtype.itemsize for shape in shapes]
    offsets, at = [], 0
    for shape, row_bytes in zip(shapes, rows, strict=True):
        offsets.append(at)
        at += -(-shape[0] * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    shared = create(at, device)
    buffers = [
        shared.raw[offset : offset + shape[0] * row_bytes].view(dtype).view(shape)
        for offset, shape, row_bytes in zip(offsets, shapes, rows, strict=True)
    ]
    return KvMemory(shared, tuple(offsets), tuple(rows)), buffers
