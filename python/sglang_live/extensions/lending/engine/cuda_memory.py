"""Memory of a GPU that several processes map, by CUDA's virtual memory management.

CUDA's IPC handles are not used: they do not keep the memory of a process that has died.
"""

import os
from typing import Any

import torch
from sglang.srt.utils import cuda_vmm_utils as vmm

from sglang_live.bridge.memory.cuda_allocation import index_of, properties_of
from sglang_live.extensions.lending.engine.base import SharedMemory


class CudaMemory(SharedMemory):
    """One allocation of a GPU, mapped by this process.

    Args:
        size: of the allocation: n_bytes, and what fills its last granule.
        device: that uses it, which may be another one than has it.
        handle: of the allocation, which the mapping keeps.
    """

    def __init__(self, n_bytes: int, size: int, device: torch.device, handle: object):
        index = index_of(device)
        self._device = device
        self._reservation = vmm.VmmReservation(size, properties_of(index), index)
        try:
            self._reservation.map_existing(0, size, handle)
        except RuntimeError:
            self._reservation.close()
            raise
        self.raw = vmm.tensor_from_pointer(self._reservation.base, size, device_id=index)[:n_bytes]

    @classmethod
    def create(cls, n_bytes: int, device: torch.device) -> "CudaMemory":
        torch.zeros(1, device=device)  # calls of the driver need a context
        driver, prop = vmm._get_cuda_driver(), properties_of(index_of(device))
        size = _whole(n_bytes, prop)
        handle = vmm.check_drv(driver.cuMemCreate(size, prop, 0), "cuMemCreate")
        try:
            memory = cls(n_bytes, size, device, handle)
            exported = driver.cuMemExportToShareableHandle(handle, prop.requestedHandleTypes, 0)
            memory.fd = int(vmm.check_drv(exported, "cuMemExportToShareableHandle"))
        finally:
            vmm.check_drv(driver.cuMemRelease(handle), "cuMemRelease")
        os.set_inheritable(memory.fd, False)
        memory.clear()
        return memory

    @classmethod
    def map(cls, fd: int, n_bytes: int, device: torch.device) -> "CudaMemory":
        driver, prop = vmm._get_cuda_driver(), properties_of(index_of(device))
        imported = driver.cuMemImportFromShareableHandle(fd, prop.requestedHandleTypes)
        handle = vmm.check_drv(imported, "cuMemImportFromShareableHandle")
        try:
            return cls(n_bytes, _whole(n_bytes, prop), device, handle)
        finally:
            vmm.check_drv(driver.cuMemRelease(handle), "cuMemRelease")

    @property
    def resident_bytes(self) -> int:
        return self._reservation.size

    def clear(self) -> None:
        self.raw.zero_()
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        del self.raw
        self._reservation.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _whole(n_bytes: int, prop: Any) -> int:
    """Whole granules, since an allocation cannot be mapped in part."""
    size: int = vmm.align_up(n_bytes, vmm.get_allocation_granularity(prop))
    return size
