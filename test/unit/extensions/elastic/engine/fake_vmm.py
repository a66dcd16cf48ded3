"""CUDA's virtual memory management on a CPU: files in the place of allocations.

It keeps the rules of the driver: an allocation is mapped whole, at a multiple of the granule,
within reserved space and where nothing is mapped; memory can be used after an access call for it;
what is unmapped are whole mappings; an allocation lives as long as a handle, a mapping or a file of
it. Every call that breaks one fails, as in the driver.
"""

import ctypes
import mmap
import os
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.utils import cuda_vmm_utils as vmm

from sglang_live.extensions.elastic.engine.file_granules import _LIBC

GRANULE = 1 << 16
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
_FIXED, _NO_ACCESS = 0x10, 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class _HandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


class FakeVmm:
    """
    Attributes:
        calls_left: of each function before it fails; functions without a number never do.
        calls: how often each function was called.
    """

    CUresult = _Result
    CUmemAllocationHandleType = _HandleType
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self) -> None:
        self.calls_left: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self._spaces: dict[int, int] = {}
        self._mappings: dict[int, bool] = {}  # by address: whether it can be used
        self._handles: set[int] = set()

    def install(self, monkeypatch: Any) -> "FakeVmm":
        properties = SimpleNamespace(uuid="fake")
        monkeypatch.setattr(vmm, "_drv", self)
        monkeypatch.setattr(vmm, "tensor_from_pointer", _tensor)
        monkeypatch.setattr(torch, "zeros", _on_cpu(torch.zeros))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: _Stream())
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        return self

    @property
    def n_handles(self) -> int:
        return len(self._handles)

    @property
    def n_mapped(self) -> int:
        return len(self._mappings)

    # --- the driver ---

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())

    def cuMemGetAllocationGranularity(self, prop, flag):
        return _Result.CUDA_SUCCESS, GRANULE

    def cuMemAddressReserve(self, size, alignment, address, flags):
        if size % GRANULE or self._fails("cuMemAddressReserve"):
            return (_Result.CUDA_ERROR_INVALID_VALUE,)
        found = _LIBC.mmap(None, size + GRANULE, _NO_ACCESS, _ANONYMOUS, -1, 0)
        base = -(-found // GRANULE) * GRANULE
        _LIBC.munmap(found, base - found) if base > found else None
        _LIBC.munmap(base + size, found + GRANULE - base)
        self._spaces[base] = size
        return _Result.CUDA_SUCCESS, base

    def cuMemAddressFree(self, address, size):
        inside = any(address <= one < address + size for one in self._mappings)
        if self._spaces.get(address) != size or inside:
            return (_Result.CUDA_ERROR_INVALID_VALUE,)
        del self._spaces[address]
        _LIBC.munmap(address, size)
        return (_Result.CUDA_SUCCESS,)

    def cuMemCreate(self, size, prop, flags):
        assert prop.requestedHandleTypes == 1
        if size != GRANULE:
            return (_Result.CUDA_ERROR_INVALID_VALUE,)
        if self._fails("cuMemCreate"):
            return (_Result.CUDA_ERROR_OUT_OF_MEMORY,)
        file = os.memfd_create("fake-allocation", os.MFD_CLOEXEC)
        os.pwrite(file, b"\x55" * size, 0)  # CUDA does not promise zeros
        self._handles.add(file)
        return _Result.CUDA_SUCCESS, file

    def cuMemRelease(self, handle):
        if handle not in self._handles:
            return (_Result.CUDA_ERROR_INVALID_VALUE,)
        self._handles.remove(handle)
        os.close(handle)
        return (_Result.CUDA_SUCCESS,)

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        if handle not in self._handles or kind != 1:
            return (_Result.CUDA_ERROR_INVALID_VALUE,)
        if self._fails("cuMemExportToShareableHandle"):
            return (_Result.CUDA_ERROR_OUT_OF_MEMORY,)
        return _Result.CUDA_SUCCESS, os.dup(handle)

    def cuMemImportFromShareableHandle(self, file, kind):
        if kind != 1 or self._fails("cuMemImportFromShareableHandle"):
            return (_Result.CUDA_ERROR_INVALID_VALUE,)
        handle = os.dup(file)
        self._handles.add(handle)
        return _Result.CUDA_SUCCESS, handle

    def cuMemMap(self, address, size, offset, handle, flags):
        inside = any(b <= address and address + size <= b + n for b, n in self._spaces.items())
        wrong = size != GRANULE or offset or address % GRANULE or not inside
        if wrong or address in self._mappings or handle not in self._handles:
            return (_Result.CUDA_ERROR_INVALID_VALUE,)
        if self._fails("cuMemMap"):
            return (_Result.CUDA_ERROR_OUT_OF_MEMORY,)
        _LIBC.mmap(address, size, _NO_ACCESS, mmap.MAP_SHARED | _FIXED, handle, 0)
        self._mappings[address] = False
        return (_Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, size, access, n):
        if not self._are_whole(address, size) or n != 1:
            return (_Result.CUDA_ERROR_INVALID_VALUE,)
        if self._fails("cuMemSetAccess"):
            return (_Result.CUDA_ERROR_OUT_OF_MEMORY,)
        _LIBC.mprotect(address, size, _READ_WRITE)
        self._mappings |= dict.fromkeys(range(address, address + size, GRANULE), True)
        return (_Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, size):
        if not self._are_whole(address, size):
            return (_Result.CUDA_ERROR_INVALID_VALUE,)
        _LIBC.mmap(address, size, _NO_ACCESS, _ANONYMOUS | _FIXED, -1, 0)
        for one in range(address, address + size, GRANULE):
            del self._mappings[one]
        return (_Result.CUDA_SUCCESS,)

    def _are_whole(self, address: int, size: int) -> bool:
        places = range(address, address + size, GRANULE)
        return size > 0 and size % GRANULE == 0 and all(one in self._mappings for one in places)

    def _fails(self, name: str) -> bool:
        self.calls[name] = self.calls.get(name, 0) + 1
        left = self.calls_left.get(name)
        if left is None:
            return False
        self.calls_left[name] = left - 1
        return left <= 0


class _Stream:
    def synchronize(self) -> None:
        pass


def _on_cpu(maker):
    return lambda *args, device=None, **kwargs: maker(*args, **kwargs)


def _tensor(pointer: int, n_bytes: int, *, device_id: int) -> torch.Tensor:
    raw = (ctypes.c_char * n_bytes).from_address(pointer)
    return torch.frombuffer(raw, dtype=torch.uint8)
