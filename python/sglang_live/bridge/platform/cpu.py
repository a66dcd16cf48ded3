"""SGLang on a machine without an accelerator: the reference platform.

The real engine, radix tree, sessions and HiCache run; only the device is different. SGLang's own
CPU path needs kernels that are not published for it, hence an out-of-tree platform.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

# What computes, beside what passes messages on in the same stage: 3 to 1 where both could run.
COMPUTING_NICE = 5


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`: None where CUDA is present."""
    if torch.cuda.is_available():
        return None
    return f"{__name__}.CpuReferencePlatform"


def is_active() -> bool:
    return activate() is not None


def share_cores(n_sharing: int) -> None:
    """Give this process's children their part of the cores, unless the user has said how many.

    OpenMP's default is all cores for every process, and its threads spin while they wait: engines
    that compute at the same time then slow each other down tenfold.
    """
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (n_cores or 1) // n_sharing)))


def begin_computing() -> None:
    """Called in a thread that runs a model: others of its stage, which pass on what comes and what
    is made, go first; and denormal numbers count as zeros, also in threads that it starts.

    The reference attention also computes rows that it never filled and will not use. Where that
    memory reads as denormal numbers, a prefill takes 60 times as long.
    """
    os.nice(COMPUTING_NICE)  # of this thread, on Linux
    torch.set_flush_denormal(True)


def begin_computing_and(initialize: Callable[[Any], None], model_runner: Any) -> None:
    """Around ModelRunner.initialize."""
    begin_computing()
    initialize(model_runner)


def __getattr__(name: str):
    # The class is built on first use: discovering platforms must not import the engine.
    if name != "CpuReferencePlatform":
        raise AttributeError(name)
    platform = _platform_class()
    globals()[name] = platform
    return platform


def _platform_class() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self) -> type:
            from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

            return PagedTokenToKVPoolAllocator

        def is_pin_memory_available(self, device=None) -> bool:
            return False

    return CpuReferencePlatform
