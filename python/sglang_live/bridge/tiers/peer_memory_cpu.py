"""A lender's KV memory on the CPU platform: a file without a name, and mappings of it.

The lender's file is new with every process, and has no name: memory that a dead lender has lent
stays as it was, as long as a borrower maps it, and no later lender writes to it.
"""

import mmap
import os
from typing import Any

import torch

from sglang_live.bridge.platform.kv_memory import KvMemory
from sglang_live.kv.peer_layout import Geometry, Memory


def geometry_of(kv: Any, page_size: int) -> Geometry:
    """The geometry of SGLang's KV pool on this rank."""
    layout = kv.kv_cache_layout if hasattr(kv, "kv_cache_layout") else type(kv).__name__
    return Geometry(
        dtype=str(kv.store_dtype).removeprefix("torch."),
        layout=layout,
        n_layers=kv.layer_num,
        n_heads=getattr(kv, "head_num", 0),
        k_dim=getattr(kv, "head_dim", 0),
        v_dim=getattr(kv, "v_head_dim", 0),
        page_size=page_size,
    )


def memory_of(kv: Any) -> tuple[int, Memory] | None:
    """The file of an engine's KV buffers, and where they are in it; None if they are private."""
    shared: KvMemory | None = getattr(kv, "kv_memory", None)
    if shared is None:
        return None
    return shared.fd, Memory(
        offsets=shared.offsets, row_bytes=shared.row_bytes, n_bytes=shared.n_bytes
    )


def map_memory(fd: int, n_bytes: int) -> torch.Tensor:
    """Map a lender's file; the mapping ends with the tensor. Closes fd."""
    try:
        return torch.frombuffer(mmap.mmap(fd, n_bytes), dtype=torch.uint8)
    finally:
        os.close(fd)
