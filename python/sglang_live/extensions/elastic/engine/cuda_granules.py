"""Granules of a GPU: allocations of CUDA's virtual memory management, one for each granule.

An allocation cannot be mapped in part, so each granule has a handle of its own, and a file of its
own in messages. A handle, a mapping and a file each keep the memory: once it is passed on, nothing
of it stays here, and what a process had is free when the process has ended. Behind what is mapped
an access is a fault of the device, which ends the process.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from sglang.srt.utils import cuda_vmm_utils as vmm
from torch import Tensor

from sglang_live.bridge.memory.cuda_allocation import index_of, properties_of
from sglang_live.extensions.elastic.engine.granule_store import GranuleStore
from sglang_live.extensions.elastic.granules import Run, count


class CudaGranules(GranuleStore):
    """Runs have a number that this process has drawn as memory, and count its allocations."""

    most_passed = 250  # Linux passes at most 253 files with a message

    def __init__(self, device: torch.device):
        torch.zeros(1, device=device)  # calls of the driver need a context
        self._index = index_of(device)
        self._properties = properties_of(self._index)
        self._access = [vmm.make_rw_access_desc(self._index)]
        self.granule_bytes = vmm.get_allocation_granularity(self._properties)
        self.place = f"cuda {torch.cuda.get_device_properties(self._index).uuid}"
        self.memory = int.from_bytes(os.urandom(7))
        self._n_created = 0
        self._handles: dict[tuple[int, int], Any] = {}  # by memory and place in it
        self._mapped: set[int] = set()  # addresses
        self._reserved = (0, 0)

    def create(self, n: int) -> Run:
        run = Run(self.memory, self._n_created, n)
        for key in _keys([run]):
            self._handles[key] = _call("cuMemCreate", self.granule_bytes, self._properties, 0)
            self._n_created += 1
        return run

    def accept(self, runs: Sequence[Run], files: Sequence[int]) -> None:
        kind = self._properties.requestedHandleTypes
        imported: dict[tuple[int, int], Any] = {}
        try:
            if len(files) != count(runs):
                raise ValueError(f"{count(runs)} granules came with {len(files)} files")
            for key, file in zip(_keys(runs), files, strict=True):
                imported[key] = _call("cuMemImportFromShareableHandle", file, kind)
        except OSError:
            for handle in imported.values():
                _call("cuMemRelease", handle)
            raise
        finally:
            for file in files:
                os.close(file)
        self._handles |= imported

    def files_of(self, runs: Sequence[Run]) -> tuple[int, ...]:
        kind, files = self._properties.requestedHandleTypes, []
        try:
            for key in _keys(runs):
                handle = self._handles[key]
                files.append(int(_call("cuMemExportToShareableHandle", handle, kind, 0)))
                os.set_inheritable(files[-1], False)
        except OSError:
            for file in files:
                os.close(file)
            raise
        return tuple(files)

    def keep(self, runs: Sequence[Run]) -> None:
        for key in self._handles.keys() - set(_keys(runs)):
            _call("cuMemRelease", self._handles.pop(key))

    def free_away(self, kept: Sequence[Run]) -> None:
        """The driver has freed it with the process."""

    def reserve(self, n_bytes: int) -> int:
        address = int(_call("cuMemAddressReserve", n_bytes, self.granule_bytes, 0, 0))
        self._reserved = (address, n_bytes)
        return address

    def tensor(self, address: int, n_bytes: int) -> Tensor:
        return vmm.tensor_from_pointer(address, n_bytes, device_id=self._index)

    def map(self, address: int, runs: Iterable[Run]) -> None:
        end = address
        for key in _keys(runs):
            _call("cuMemMap", end, self.granule_bytes, 0, self._handles[key], 0)
            self._mapped.add(end)
            end += self.granule_bytes
        if end > address:
            _call("cuMemSetAccess", address, end - address, self._access, len(self._access))
            self._wipe(address, end - address)  # CUDA does not promise zeros of new ones

    def unmap(self, address: int, n_bytes: int) -> None:
        step = self.granule_bytes
        mapped = [one for one in range(address, address + n_bytes, step) if one in self._mapped]
        # Adjacent ones are as far from each other as their numbers.
        for _, group in groupby(enumerate(mapped), lambda item: item[1] - item[0] * step):
            adjacent = [one for _, one in group]
            _call("cuMemUnmap", adjacent[0], len(adjacent) * step)
            self._mapped.difference_update(adjacent)

    def unmap_wiped(self, address: int, runs: Sequence[Run]) -> None:
        n_bytes = count(runs) * self.granule_bytes
        if not n_bytes:
            return
        torch.cuda.synchronize(self._index)  # a batch that was launched earlier may write there
        self._wipe(address, n_bytes)
        self.unmap(address, n_bytes)

    def close(self) -> None:
        torch.cuda.synchronize(self._index)
        if self._reserved[1]:
            self.unmap(*self._reserved)
            _call("cuMemAddressFree", *self._reserved)
        self.keep(())
        self._reserved = (0, 0)

    def use_in_thread(self) -> None:
        torch.cuda.set_device(self._index)

    def _wipe(self, address: int, n_bytes: int) -> None:
        self.tensor(address, n_bytes).zero_()
        torch.cuda.current_stream(self._index).synchronize()


def _keys(runs: Iterable[Run]) -> Iterator[tuple[int, int]]:
    return ((run.memory, at) for run in runs for at in range(run.first, run.end))


def _call(name: str, *args: Any) -> Any:
    """Raises OSError: the driver refuses it."""
    try:
        return vmm.check_drv(getattr(vmm._get_cuda_driver(), name)(*args), name)
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, str(error)) from error
