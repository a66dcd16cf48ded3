"""KV buffers in memory that other processes can map (shared_memory.py).

In: a pool of plain attention. Out: its K and V buffers, and where they are in the memory.
Owner: the pool, as long as it exists. Only where SHARED_KV_ENV is set; otherwise SGLang allocates.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_live.bridge.memory.elastic_buffers import create_elastic_buffers, planned
from sglang_live.bridge.memory.shared_memory import SharedMemory, create

# "1": KV buffers are in memory that the engine may share.
SHARED_KV_ENV = "SGLANG_LIVE_SHARED_KV"


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


def share_kv(*, lends: bool, is_elastic: bool) -> None:
    """Tell the processes that this one starts in which memory their KV buffers are.

    Args:
        lends: they may be shared.
        is_elastic: they exchange memory (elastic_buffers.py).
    """
    os.environ[SHARED_KV_ENV] = str(int(lends))
    if lends or is_elastic:
        # With it, SGLang on a GPU sizes the pool after its graphs are captured, and allocates it
        # in a way of its own.
        os.environ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] = "0"


def create_buffers(upstream: Callable[[Any], None], pool: Any) -> None:
    """Around MHATokenToKVPool._create_buffers_normal."""
    if (plan := planned()) is not None:
        create_elastic_buffers(plan, pool)
        return
    if os.environ.get(SHARED_KV_ENV) != "1" or pool.kv_cache_layout != "nhd":
        upstream(pool)
        return
    k_shape, v_shape = pool._kv_buffer_shapes()
    shapes = [k_shape] * pool.layer_num + [v_shape] * pool.layer_num
    memory, buffers = shared_buffers(shapes, pool.store_dtype, torch.device(pool.device))
    pool.k_buffer, pool.v_buffer = buffers[: pool.layer_num], buffers[pool.layer_num :]
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
