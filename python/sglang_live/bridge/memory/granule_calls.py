"""Linux's calls for memory in granules: address space, mappings of files, freeing.

Errors are OSError. No tensors here: the server's own process frees memory as well.
"""

import ctypes
import mmap
import os

from sglang_live.kv.granules import Run

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


def reserve(n_bytes: int) -> int:
    """Address space that reads as zeros. Returns its address."""
    return _map(None, n_bytes, mmap.PROT_READ, _ZEROS, -1, 0)


def map_zeros(place: int, n_bytes: int) -> None:
    """Replace what is mapped there by zeros that cannot be written."""
    _map(place, n_bytes, mmap.PROT_READ, _ZEROS | _MAP_FIXED, -1, 0)


def map_file(place: int, n_bytes: int, file: int, offset: int) -> None:
    """Replace what is mapped there by a part of a file."""
    _map(place, n_bytes, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file, offset)


def unmap(place: int, n_bytes: int) -> None:
    if _LIBC.munmap(place, n_bytes):
        raise _error()


def free_granules(file: int, run: Run) -> None:
    """Free the memory of a run, which then reads as zeros; wherever it is mapped."""
    offset, n_bytes = run.first * GRANULE_BYTES, run.n * GRANULE_BYTES
    mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
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
