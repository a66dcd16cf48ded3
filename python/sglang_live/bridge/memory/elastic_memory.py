"""Layer buffers of a KV pool in shared memory, mapped into reserved address space (CPU).

Each buffer has address space for more rows than memory. Memory is mapped at its end in granules,
or taken from there, so base addresses, and with them attention, graphs and the radix tree, never
change. Behind the end reads find zeros and a write is a fault.
In: geometry, runs of granules. Out: tensors. Owner: one ElasticMemory per pool.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch
from torch import Tensor

from sglang_live.bridge.memory.granule_calls import (
    GRANULE_BYTES,
    free_granules,
    map_file,
    map_zeros,
    reserve,
    unmap,
)
from sglang_live.kv.granules import Run, count, joined, split, without


@dataclass(frozen=True)
class Geometry:
    """
    Attributes:
        row_bytes: of one token slot, of each buffer.
        page_size: token slots per page of the allocator.
    """

    row_bytes: tuple[int, ...]
    page_size: int

    @cached_property
    def unit_rows(self) -> int:
        """The least rows that are whole pages, and whole granules of every buffer."""
        whole = (lcm(GRANULE_BYTES, one) // one for one in self.row_bytes)
        return lcm(self.page_size, *whole)

    @cached_property
    def unit_granules(self) -> tuple[int, ...]:
        """Granules of a unit, of each buffer."""
        return tuple(self.unit_rows * one // GRANULE_BYTES for one in self.row_bytes)

    @cached_property
    def granules(self) -> int:
        """Of a unit, of all buffers."""
        return sum(self.unit_granules)

    def tokens(self, units: int) -> int:
        """Usable token slots: the first page absorbs writes of padding."""
        return units * self.unit_rows - self.page_size

    def units(self, tokens: int) -> int:
        """Whole units whose slots are at most `tokens`; at least one."""
        return max(1, (tokens + self.page_size) // self.unit_rows)

    def units_for(self, tokens: int) -> int:
        """Whole units with at least `tokens` slots."""
        return -(-(tokens + self.page_size) // self.unit_rows)


class ElasticMemory:
    """
    Args:
        reserved_rows: rows of each buffer.
        granules: memory at first, in a file of this process.

    Attributes:
        units: units that are backed.
        memory: inode of this process's file.

    Raises:
        OSError: there is no address space, or no memory.
    """

    def __init__(self, geometry: Geometry, reserved_rows: int, granules: int):
        self.geometry = geometry
        file = os.memfd_create("sglang_live-kv", os.MFD_CLOEXEC)
        self.memory = os.fstat(file).st_ino
        self._files = {self.memory: file}
        self._spare: list[Run] = []  # granules that fill no unit
        spans = [_whole(reserved_rows * one) for one in geometry.row_bytes]
        base = reserve(sum(spans))
        self._bases = [base + sum(spans[:at]) for at in range(len(spans))]
        self._span_bytes, self._limit = sum(spans), reserved_rows // geometry.unit_rows
        self.units = 0
        self._runs: list[list[Run]] = [[] for _ in spans]
        os.ftruncate(file, granules * GRANULE_BYTES)
        self._extend([Run(self.memory, 0, granules)])

    @property
    def granules(self) -> int:
        """What this process has, mapped or not."""
        return self.units * self.geometry.granules + self.n_spare

    @property
    def n_spare(self) -> int:
        """Granules that fill no unit."""
        return count(self._spare)

    @property
    def limit_granules(self) -> int:
        """What the address space can hold."""
        return self._limit * self.geometry.granules

    @property
    def n_files(self) -> int:
        return len(self._files)

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Buffer `at`, as a tensor over all its reserved rows."""
        n_bytes = shape[0] * self.geometry.row_bytes[at]
        raw = (ctypes.c_char * n_bytes).from_address(self._bases[at])
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(*shape)

    def receive(self, runs: Sequence[Run], files: dict[int, int]) -> None:
        """Map runs at the end of every buffer, in whole units; the others wait for more.

        Args:
            files: of the runs' memories. This process owns them from now on.
        Raises:
            OSError, ValueError: nothing has changed, and the files are closed.
        """
        for memory, file in files.items():
            if memory in self._files:
                os.close(file)
            else:
                self._files[memory] = file
        try:
            if absent := {run.memory for run in runs} - self._files.keys():
                raise ValueError(f"{len(absent)} files of received memory are missing")
            self._extend(runs)
        except (OSError, ValueError):
            self.close_unused()
            raise

    def units_without(self, granules: int) -> int:
        """Units that are left when this number of granules has been released."""
        missing = max(0, granules - self.n_spare)
        return self.units - -(-missing // self.geometry.granules)

    def release(self, granules: int) -> list[Run]:
        """Unmap the last units, as many as it takes. The runs belong to the message that is sent;
        files_of() has their files, and close_unused() is due when it has been sent.
        """
        left = self.units_without(granules)
        assert 0 < left <= self.units, (left, self.units)
        freed = list(self._spare)
        for at, n in enumerate(self.geometry.unit_granules):
            self._runs[at], tail = split(self._runs[at], n * left)
            freed += tail
        self._map_zeros(left, self.units - left)
        self.units = left
        released, spare = split(freed, granules)
        self._spare = joined(spare)
        for run in self._spare:  # it is mapped again later, and must read as zeros
            free_granules(self._files[run.memory], run)
        return joined(released)

    def files_of(self, runs: Sequence[Run]) -> tuple[int, ...]:
        return tuple(self._files[memory] for memory in {run.memory for run in runs})

    def close_unused(self) -> None:
        """Close files of other processes of which nothing is left here."""
        used = {run.memory for runs in (*self._runs, self._spare) for run in runs}
        for memory in self._files.keys() - used - {self.memory}:
            os.close(self._files.pop(memory))

    def free_away(self) -> None:
        """Free what another process had of this one's file, after that process has ended."""
        file = self._files[self.memory]
        there = Run(self.memory, 0, os.fstat(file).st_size // GRANULE_BYTES)
        here = [run for runs in (*self._runs, self._spare) for run in runs]
        for run in without([there], here):
            free_granules(file, run)

    def close(self) -> None:
        """Unmap everything. The tensors must not be used any more."""
        unmap(self._bases[0], self._span_bytes)
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _extend(self, runs: Sequence[Run]) -> None:
        have = [*self._spare, *runs]
        units = min(count(have) // self.geometry.granules, self._limit - self.units)
        pieces, rest = [], have
        for n in self.geometry.unit_granules:
            piece, rest = split(rest, n * units)
            pieces.append(piece)
        try:
            for at, piece in enumerate(pieces):
                self._map_runs(at, piece)
        except OSError:
            self._map_zeros(self.units, units)
            raise
        for at, piece in enumerate(pieces):
            self._runs[at] = joined([*self._runs[at], *piece])
        self.units += units
        self._spare = joined(rest)

    def _map_runs(self, at: int, runs: Sequence[Run]) -> None:
        """Map runs behind the end of a buffer."""
        place = self._bases[at] + self.units * self.geometry.unit_granules[at] * GRANULE_BYTES
        for run in runs:
            n_bytes, offset = run.n * GRANULE_BYTES, run.first * GRANULE_BYTES
            map_file(place, n_bytes, self._files[run.memory], offset)
            place += n_bytes

    def _map_zeros(self, first: int, units: int) -> None:
        if not units:
            return
        for base, n in zip(self._bases, self.geometry.unit_granules, strict=True):
            map_zeros(base + first * n * GRANULE_BYTES, units * n * GRANULE_BYTES)


def _whole(n_bytes: int) -> int:
    return -(-n_bytes // GRANULE_BYTES) * GRANULE_BYTES
