"""Allocations of a GPU that extensions pass to other processes as files."""

from typing import Any

import torch
from sglang.srt.utils import cuda_vmm_utils as vmm


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def properties_of(index: int) -> Any:
    """Of an allocation that has a file descriptor."""
    kinds = vmm._get_cuda_driver().CUmemAllocationHandleType
    kind = int(kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return vmm.make_device_allocation_prop(index, handle_types=kind)
