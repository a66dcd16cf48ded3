"""Copies from the host to a device that do not wait for the device."""

import torch
from torch import Tensor


def copy_to(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`values`, a tensor on the host, on `device`.

    From pageable memory CUDA first waits until the stream has done all its work, so the values go
    through pinned memory, which torch keeps until the copy is done.
    """
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, dtype or values.dtype, non_blocking=True)
