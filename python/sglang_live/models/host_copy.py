"""Copies from the host to a device that do not wait for the device.

From pageable memory CUDA first waits until the stream has done all its work, and copies then.
"""

import torch
from torch import Tensor


def copy_to(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`values` on `device`, by way of pinned memory, which torch keeps until the copy is done."""
    if device.type == "cuda":
        values = pinned(values)
    return values.to(device, dtype or values.dtype, non_blocking=True)


def pinned(values: Tensor) -> Tensor:
    """`values` in pinned memory, unless they are on a device."""
    return values.pin_memory() if values.device.type == "cpu" else values
