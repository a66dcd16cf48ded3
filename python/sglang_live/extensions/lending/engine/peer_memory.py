"""The KV memory of a lender and of a borrower as the protocol of leases describes it."""

from typing import Any

import torch

from sglang_live.extensions.lending.engine.shared_buffers import KvMemory
from sglang_live.extensions.lending.layout import Geometry, Memory


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
    found: KvMemory | None = getattr(kv, "kv_memory", None)
    if found is None:
        return None
    shared = found.shared
    return shared.fd, Memory(
        kind=shared.raw.device.type,
        offsets=found.offsets,
        row_bytes=found.row_bytes,
        n_bytes=shared.n_bytes,
    )


def device_of(kv: Any) -> torch.device:
    """The device of SGLang's KV pool."""
    device: torch.device = kv.k_buffer[0].device
    return device
