"""SGLang on a machine without an accelerator: the reference platform.

The real engine, radix tree, sessions and HiCache run; only the device is different. SGLang's own
CPU path needs kernels that are not published for it, hence an out-of-tree platform.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

# What computes, beside what passes messages on in the same stage: 3 to 1 where both could run.
COMPUTING_NICE = 5

_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_TRIES = 20


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


def be_nice(nice: int) -> None:
    """Let this process, and those it starts, stand back by so much where cores are short.

    Linux may schedule sessions (setsid) as groups that share the cores evenly (sched(7), "The
    autogroup feature"). A process's nice value then counts within its session only; so where this
    process leads one, as a stage does, the session's group gets the same.
    """
    os.nice(nice)
    if os.getsid(0) != os.getpid() or not _AUTOGROUP.exists():
        return
    for _ in range(_AUTOGROUP_TRIES):
        try:
            _AUTOGROUP.write_text(str(nice))
        except BlockingIOError:  # others have set theirs: one in a tenth of a second may
            time.sleep(0.1)
        except OSError as error:
            log.warning("autogroup_keeps_its_share nice=%d reason=%s", nice, error)
            return
        else:
            return
    log.warning("autogroup_keeps_its_share nice=%d reason=others were always first", nice)


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
