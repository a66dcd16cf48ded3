"""Timing on an asynchronous device, and exact float32."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

N_WARM_UP = 3


def median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time from a call until the device has finished it."""
    times_ms = []
    for i in range(N_WARM_UP + repeats):
        synchronize(device)
        begin_s = time.perf_counter()
        call()
        synchronize(device)
        if i >= N_WARM_UP:  # the first calls load kernels and allocate
            times_ms.append((time.perf_counter() - begin_s) * 1e3)
    return statistics.median(times_ms)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Turn off TF32, which PyTorch allows in convolutions by default, within the context."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
