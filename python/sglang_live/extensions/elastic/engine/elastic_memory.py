"""Layer buffers of a KV pool in granules of memory, mapped into reserved address space.

Each buffer has address space for more rows than memory. Memory is mapped at its end in granules,
or taken from there, so base addresses, and with them attention, graphs and the radix tree, never
change. Behind the end a write is a fault.
In: geometry, runs of granules. Out: tensors. Owner: one ElasticMemory per pool.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch
from torch import Tensor

from sglang_live.extensions.elastic.engine.granule_store import GranuleStore
from sglang_live.extensions.elastic.granules import Run, count, joined, split

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Geometry:
    """
    Attributes:
        row_bytes: of one token slot, of each buffer.
        page_size: token slots per page of the allocator.
        granule_bytes: of the memory.
    """

    row_bytes: tuple[int, ...]
    page_size: int
    granule_bytes: int

    @cached_property
    def unit_rows(self) -> int:
        """The least rows that are whole pages, and whole granules of every buffer."""
        whole = (lcm(self.granule_bytes, one) // one for one in self.row_bytes)
        return lcm(self.page_size, *whole)

    @cached_property
    def unit_granules(self) -> tuple[int, ...]:
        """Granules of a unit, of each buffer."""
        return tuple(self.unit_rows * one // self.granule_bytes for one in self.row_bytes)

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


@dataclass(frozen=True, slots=True)
class Passed:
    """Memory on its way to another process.

    Attributes:
        files: of the runs. They are to be closed when they have been passed on.
    """

    runs: list[Run]
    files: tuple[int, ...]


class ElasticMemory:
    """
    Args:
        reserved_rows: rows of each buffer.
        granules: memory at first, of this process.

    Attributes:
        units: units that are backed.

    Raises:
        OSError: there is no address space, or no memory.
    """

    def __init__(self, store: GranuleStore, geometry: Geometry, reserved_rows: int, granules: int):
        self.store = store
        self.geometry = geometry
        self._spare: list[Run] = []  # granules that fill no unit
        one = geometry.granule_bytes
        spans = [-(-reserved_rows * row // one) * one for row in geometry.row_bytes]
        base = store.reserve(sum(spans))
        self._bases = [base + sum(spans[:at]) for at in range(len(spans))]
        self._limit = reserved_rows // geometry.unit_rows
        self.units = 0
        self._runs: list[list[Run]] = [[] for _ in spans]
        self._extend([store.create(granules)])

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

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Buffer `at`, as a tensor over all its reserved rows."""
        n_bytes = shape[0] * self.geometry.row_bytes[at]
        return self.store.tensor(self._bases[at], n_bytes).view(dtype).view(*shape)

    def receive(self, runs: Sequence[Run], files: Sequence[int]) -> None:
        """Map runs at the end of every buffer, in whole units; the others wait for more.

        Args:
            files: that came with the runs. They are closed.
        Raises:
            OSError, ValueError: nothing has changed.
        """
        self.store.accept(runs, files)
        try:
            self._extend(runs)
        except OSError:
            self.store.keep(self._have)
            raise

    def units_without(self, granules: int) -> int:
        """Units that are left when this number of granules has been released."""
        missing = max(0, granules - self.n_spare)
        return self.units - -(-missing // self.geometry.granules)

    def release(self, granules: int) -> Passed:
        """Unmap the last units, as many as it takes, and pass granules on. They read as zeros, so
        nothing of other sessions is passed with them. If the system has no files for them,
        none is passed, and this process keeps them.
        """
        left = self.units_without(granules)
        assert 0 < left <= self.units, (left, self.units)
        freed = list(self._spare)
        for at, n in enumerate(self.geometry.unit_granules):
            self._runs[at], tail = split(self._runs[at], n * left)
            self.store.unmap_wiped(self._address(at, left), tail)
            freed += tail
        self.units = left
        released, spare = split(freed, granules)
        try:
            passed = Passed(joined(released), self.store.files_of(joined(released)))
        except OSError as error:
            log.error("kv_memory_not_passed error=%s", error)
            passed, spare = Passed([], ()), freed
        self._spare = joined(spare)
        self.store.keep(self._have)
        return passed

    def free_away(self) -> None:
        """Free what another process had of this one's memory, after that process has ended."""
        self.store.free_away(self._have)

    def close(self) -> None:
        """Unmap everything. The tensors must not be used any more."""
        self.store.close()

    @property
    def _have(self) -> list[Run]:
        return [run for runs in (*self._runs, self._spare) for run in runs]

    def _address(self, at: int, units: int) -> int:
        """Behind this many units of a buffer."""
        n_bytes = units * self.geometry.unit_granules[at] * self.geometry.granule_bytes
        return self._bases[at] + n_bytes

    def _extend(self, runs: Sequence[Run]) -> None:
        have = [*self._spare, *runs]
        units = min(count(have) // self.geometry.granules, self._limit - self.units)
        pieces, rest = [], have
        for n in self.geometry.unit_granules:
            piece, rest = split(rest, n * units)
            pieces.append(piece)
        try:
            for at, piece in enumerate(pieces):
                self.store.map(self._address(at, self.units), piece)
        except OSError:
            for at in range(len(pieces)):
                begin = self._address(at, self.units)
                self.store.unmap(begin, self._address(at, self.units + units) - begin)
            raise
        for at, piece in enumerate(pieces):
            self._runs[at] = joined([*self._runs[at], *piece])
        self.units += units
        self._spare = joined(rest)
