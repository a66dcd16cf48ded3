"""SGLang's platform for machines without an accelerator: the reference platform.

The real engine, radix tree, sessions and HiCache run; only the device is different. SGLang's own
CPU path needs kernels that are not published, hence an out-of-tree platform.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

# Niceness of threads that compute: a thread of the same stage that passes messages gets three
# times their share of a core.
COMPUTING_NICE = 5


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`. Returns None if CUDA is present."""
    if torch.cuda.is_available():
        return None
    return f"{__name__}.CpuReferencePlatform"


def is_active() -> bool:
    return activate() is not None


def share_cores(n_sharing: int) -> None:
    """Set the OpenMP threads of this process's children, unless OMP_NUM_THREADS is set.

    OpenMP's default is all cores for every process, and its threads spin while they wait: engines
    that compute at the same time then slow each other down tenfold.
    """
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (n_cores or 1) // n_sharing)))


def place_ranks(n_ranks: int) -> None:
    """Let several ranks of an engine run on one NUMA node, which SGLang otherwise refuses.

    SGLang's own kernels alone bind threads to the cores that are named here, and there are none.
    """
    if n_ranks > 1:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(["0"] * n_ranks))


def begin_computing() -> None:
    """Lower the priority of a thread that runs a model, and flush denormal numbers to zero, also
    in the threads that it starts.

    The stage's threads that pass messages then run first. The reference attention also computes
    unfilled rows that it does not use: where that memory reads as denormal numbers, a prefill
    takes 60 times as long.
    """
    os.nice(COMPUTING_NICE)  # of this thread, on Linux
    torch.set_flush_denormal(True)


def begin_computing_and(initialize: Callable[[Any], None], model_runner: Any) -> None:
    """Around ModelRunner.initialize."""
    from sglang_live.bridge.platform.int8_weights import quantise, wants_int8

    begin_computing()
    initialize(model_runner)
    if wants_int8():
        quantise(model_runner.model)


def __getattr__(name: str) -> type:
    # The class is built on first use: the discovery of platforms must not import the engine.
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

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def get_torch_profiler_activity_str(self) -> str:
            return "CPU"

        def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
            return torch.profiler.ProfilerActivity.CPU

    return CpuReferencePlatform
