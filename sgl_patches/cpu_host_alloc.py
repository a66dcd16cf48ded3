"""HiCache's host pool on a CPU-only machine is plain memory, which no device needs pinned."""

import torch

TARGET = "sglang.srt.mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS"
KIND = "item"
SIGNATURE = None
WHY = "the default allocator registers host memory with CUDA"
DROP_WHEN = "upstream's host pool allocates plain memory for device type cpu"
STAGES = ("*",)
CPU_ONLY = True


def _alloc(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    return torch.empty(dims, dtype=dtype, device=device)


HOOK = ("cpu", _alloc)
