"""A KV pool of SGLang whose buffers are in elastic memory, from its creation on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_live.extensions.elastic.engine.elastic_memory import ElasticMemory, Geometry
from sglang_live.extensions.elastic.engine.file_granules import FileGranules
from sglang_live.extensions.elastic.engine.granule_store import GranuleStore


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """
    Attributes:
        reserve: address space, as a multiple of the memory at start.
        granules: from the memory, the geometry and the pool's tokens, the memory at first.
    """

    reserve: int
    granules: Callable[[GranuleStore, Geometry, int], int]


def create_elastic_buffers(plan: BufferPlan, pool: Any) -> None:
    """In the place of MHATokenToKVPool._create_buffers_normal.

    The pool's size becomes that of its address space, which its descriptions then count; it must be
    set to the backed part when the pool is complete.

    Raises:
        ValueError: the pool has another layout.
    """
    if pool.kv_cache_layout != "nhd":
        raise ValueError(f"elastic KV needs the layout nhd, this pool has {pool.kv_cache_layout}")
    n_tokens, item = pool.size, pool.store_dtype.itemsize
    shapes = [shape for shape in pool._kv_buffer_shapes() for _ in range(pool.layer_num)]
    row_bytes = tuple(item * torch.Size(shape[1:]).numel() for shape in shapes)
    store = store_of(torch.device(pool.device))
    geometry = Geometry(row_bytes, pool.page_size, store.granule_bytes)
    granules = plan.granules(store, geometry, n_tokens)
    pool.size = geometry.tokens(plan.reserve * geometry.units(n_tokens))
    rows = pool.size + pool.page_size
    memory = ElasticMemory(store, geometry, rows, granules)
    buffers = [
        memory.tensor(at, (rows, *shape[1:]), pool.store_dtype) for at, shape in enumerate(shapes)
    ]
    pool.k_buffer = buffers[: pool.layer_num]
    pool.v_buffer = buffers[pool.layer_num :]
    pool.elastic_memory = memory


def store_of(device: torch.device) -> GranuleStore:
    """Raises OSError, RuntimeError, ImportError: the device has no such memory."""
    if device.type == "cuda":
        from sglang_live.extensions.elastic.engine.cuda_granules import CudaGranules

        return CudaGranules(device)
    return FileGranules()
