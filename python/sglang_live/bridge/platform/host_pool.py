"""The memory of HiCache's host pool as CUDA knows it."""

from typing import Any

from torch import Tensor


def unregister(pool: Any) -> None:
    """End the registration of the buffers of a HostKVCache; nothing where none is registered.

    Memory that is freed while it is registered stays pinned, and a later pool at the same address
    cannot be registered.
    """
    from sglang.srt.mem_cache.pool_host import common

    buffers = pool.kv_buffer
    for buffer in [buffers] if isinstance(buffers, Tensor) else buffers or ():
        if getattr(buffer, common._CUDA_HOST_REGISTERED_RANGES_ATTR, None):
            common._cuda_host_unregister(buffer)
