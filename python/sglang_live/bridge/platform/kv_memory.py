"""KV buffers of the CPU platform in a file without a name, which other processes can map.

In: a pool of plain attention. Out: its K and V buffers, and where they are in the file.
Owner: the pool, as long as it exists. Only where SHARED_KV_ENV is set; otherwise SGLang allocates.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_live.bridge.platform.elastic_buffers import create_elastic_buffers, planned

# "1": KV buffers are in a file that the engine may share.
SHARED_KV_ENV = "SGLANG_LIVE_SHARED_KV"


@dataclass(frozen=True, slots=True)
class KvMemory:
    """
    Attributes:
        fd: of the file, as long as the process lives.
        offsets: of each buffer in the file, K of each layer, then V of each layer; whole pages of
            the machine.
        row_bytes: of one slot in each buffer.
        n_bytes: of the file.
    """

    fd: int
    offsets: tuple[int, ...]
    row_bytes: tuple[int, ...]
    n_bytes: int


def create_buffers(create: Callable[[Any], None], pool: Any) -> None:
    """Around MHATokenToKVPool._create_buffers_normal."""
    if (plan := planned()) is not None:
        create_elastic_buffers(plan, pool)
        return
    if os.environ.get(SHARED_KV_ENV) != "1" or pool.kv_cache_layout != "nhd":
        create(pool)
        return
    k_shape, v_shape = pool._kv_buffer_shapes()
    shapes = [k_shape] * pool.layer_num + [v_shape] * pool.layer_num
    memory, buffers = shared_buffers(shapes, pool.store_dtype)
    pool.k_buffer, pool.v_buffer = buffers[: pool.layer_num], buffers[pool.layer_num :]
    pool.kv_memory = memory


def shared_buffers(
    shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> tuple[KvMemory, list[torch.Tensor]]:
    """Zeroed buffers in a new file.

    Args:
        shapes: of each buffer; the first dimension is slots.
    """
    rows = [torch.Size(shape[1:]).numel() * dtype.itemsize for shape in shapes]
    offsets, at = [], 0
    for shape, row_bytes in zip(shapes, rows, strict=True):
        offsets.append(at)
        at += -(-shape[0] * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.memfd_create("sglang_live-kv", os.MFD_CLOEXEC)
    os.ftruncate(fd, at)
    raw = torch.frombuffer(mmap.mmap(fd, at), dtype=torch.uint8)
    buffers = [
        raw[offset : offset + shape[0] * row_bytes].view(dtype).view(shape)
        for offset, shape, row_bytes in zip(offsets, shapes, rows, strict=True)
    ]
    return KvMemory(fd, tuple(offsets), tuple(rows), at), buffers
