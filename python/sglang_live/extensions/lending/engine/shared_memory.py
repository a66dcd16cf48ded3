"""Memory that several processes of a host map, on the CPU or on a GPU.

On the CPU it is a file without a name. On a GPU it is an allocation of CUDA's virtual memory
management (cuda_memory.py), which has a file descriptor as well. Both are new with every process
and have no name: what a process that has died has shared stays as it was, as long as another
process maps it, and no later process writes to it.
"""

import mmap
import os

import torch

from sglang_live.extensions.lending.engine.base import SharedMemory

CUDA = "cuda"


def create(n_bytes: int, device: torch.device) -> SharedMemory:
    """Zeros.

    Raises:
        OSError, RuntimeError: there is too little memory.
    """
    if device.type != CUDA:
        return CpuMemory.create(n_bytes)
    from sglang_live.extensions.lending.engine.cuda_memory import CudaMemory

    return CudaMemory.create(n_bytes, device)


def map_shared(fd: int, n_bytes: int, device: torch.device) -> SharedMemory:
    """Map memory of another process for use by this device. Closes fd.

    Raises:
        OSError, RuntimeError: the device cannot use it.
    """
    try:
        if device.type != CUDA:
            return CpuMemory(fd, n_bytes)
        from sglang_live.extensions.lending.engine.cuda_memory import CudaMemory

        return CudaMemory.map(fd, n_bytes, device)
    finally:
        os.close(fd)


class Launched:
    """What this thread has launched on its device so far."""

    def __init__(self, device: torch.device):
        self._event = None
        if device.type == CUDA:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_asynchronous(self) -> bool:
        return self._event is not None

    def synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class CpuMemory(SharedMemory):
    """The mapping ends with the last tensor of it."""

    def __init__(self, fd: int, n_bytes: int):
        self.raw = torch.frombuffer(mmap.mmap(fd, n_bytes), dtype=torch.uint8)

    @classmethod
    def create(cls, n_bytes: int) -> "CpuMemory":
        fd = os.memfd_create("sglang_live-kv", os.MFD_CLOEXEC)
        os.ftruncate(fd, n_bytes)
        memory = cls(fd, n_bytes)
        memory.fd = fd
        return memory

    @property
    def resident_bytes(self) -> int:
        return 512 * os.fstat(self.fd).st_blocks

    def clear(self) -> None:
        """Returns the memory to the system, which provides zeros at the next use."""
        n_bytes = self.n_bytes
        os.ftruncate(self.fd, 0)
        os.ftruncate(self.fd, n_bytes)

    def close(self) -> None:
        del self.raw
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
