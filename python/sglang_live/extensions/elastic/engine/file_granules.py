"""Granules of a CPU: pages of shared memory files without a name.

A process has one file of its own, which grows by what it creates; it keeps the file of another one
as long as it has a part of it. Behind what is mapped reads find zeros, and a write is a fault.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sglang_live.extensions.elastic.engine.granule_store import GranuleStore
from sglang_live.extensions.elastic.granules import Run, count, without

GRANULE_BYTES = mmap.PAGESIZE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_ZEROS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 0x01, 0x02
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class FileGranules(GranuleStore):
    """Runs have the inode of their file as memory."""

    granule_bytes = GRANULE_BYTES
    most_passed = 1 << 40  # a file has all granules of a process
    place = "cpu"

    def __init__(self) -> None:
        file = os.memfd_create("sglang_live-kv", os.MFD_CLOEXEC)
        self.memory = os.fstat(file).st_ino
        self._files = {self.memory: file}
        self._reserved = (0, 0)

    @property
    def n_files(self) -> int:
        return len(self._files)

    def create(self, n: int) -> Run:
        file = self._files[self.memory]
        first = os.fstat(file).st_size // GRANULE_BYTES
        os.ftruncate(file, (first + n) * GRANULE_BYTES)
        return Run(self.memory, first, n)

    def accept(self, runs: Sequence[Run], files: Sequence[int]) -> None:
        found = {os.fstat(file).st_ino: file for file in files}
        known = self._files | found
        absent = {run.memory for run in runs} - known.keys()
        if not absent:
            self._files = found | self._files
        kept = set(self._files.values())
        for file in files:
            if file not in kept:
                os.close(file)
        if absent:
            raise ValueError(f"{len(absent)} files of received memory are missing")

    def files_of(self, runs: Sequence[Run]) -> tuple[int, ...]:
        return tuple(os.dup(self._files[memory]) for memory in {run.memory for run in runs})

    def keep(self, runs: Sequence[Run]) -> None:
        for memory in self._files.keys() - {run.memory for run in runs} - {self.memory}:
            os.close(self._files.pop(memory))

    def free_away(self, kept: Sequence[Run]) -> None:
        n = os.fstat(self._files[self.memory]).st_size // GRANULE_BYTES
        for run in without([Run(self.memory, 0, n)], kept):
            self._free(run)

    def reserve(self, n_bytes: int) -> int:
        self._reserved = (_map(None, n_bytes, mmap.PROT_READ, _ZEROS, -1, 0), n_bytes)
        return self._reserved[0]

    def tensor(self, address: int, n_bytes: int) -> Tensor:
        raw = (ctypes.c_char * n_bytes).from_address(address)
        return torch.frombuffer(raw, dtype=torch.uint8)

    def map(self, address: int, runs: Iterable[Run]) -> None:
        flags = mmap.MAP_SHARED | _MAP_FIXED
        for run in runs:
            n_bytes, offset = run.n * GRANULE_BYTES, run.first * GRANULE_BYTES
            _map(address, n_bytes, _READ_WRITE, flags, self._files[run.memory], offset)
            address += n_bytes

    def unmap(self, address: int, n_bytes: int) -> None:
        if n_bytes:
            _map(address, n_bytes, mmap.PROT_READ, _ZEROS | _MAP_FIXED, -1, 0)

    def unmap_wiped(self, address: int, runs: Sequence[Run]) -> None:
        self.unmap(address, count(runs) * GRANULE_BYTES)
        for run in runs:
            self._free(run)

    def close(self) -> None:
        if self._reserved[1] and _LIBC.munmap(*self._reserved):
            raise _error()
        for file in self._files.values():
            os.close(file)
        self._files = {}
        self._reserved = (0, 0)

    def _free(self, run: Run) -> None:
        """Its memory belongs to the system again, and it reads as zeros."""
        offset, n_bytes = run.first * GRANULE_BYTES, run.n * GRANULE_BYTES
        mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
        file = self._files[run.memory]
        if _LIBC.fallocate(file, mode, ctypes.c_long(offset), ctypes.c_long(n_bytes)):
            raise _error()


def _map(place: int | None, n_bytes: int, access: int, flags: int, file: int, offset: int) -> int:
    found = _LIBC.mmap(place, n_bytes, access, flags, file, offset)
    if found == _FAILED:
        raise _error()
    return int(found)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
