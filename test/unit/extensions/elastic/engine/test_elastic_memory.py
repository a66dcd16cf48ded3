"""Granules move between memories, and every mapped row keeps what was written to it.

On the CPU, and with a driver of a GPU in whose place files are (fake_vmm.py).
"""

import faulthandler
import os
import random
import signal

import pytest
import torch

from sglang_live.extensions.elastic.engine.buffers import store_of
from sglang_live.extensions.elastic.engine.elastic_memory import ElasticMemory, Geometry, Passed
from sglang_live.extensions.elastic.engine.file_granules import GRANULE_BYTES, FileGranules
from sglang_live.extensions.elastic.engine.granule_store import GranuleStore
from test.unit.extensions.elastic.engine.fake_vmm import FakeVmm


@pytest.fixture(params=["cpu", "cuda"])
def device(request, monkeypatch) -> torch.device:
    """Of the memory; no file, handle or mapping may be left."""
    before = open_files()
    if request.param == "cuda":
        fake = FakeVmm().install(monkeypatch)
    yield torch.device(request.param, 0)
    assert open_files() == before
    if request.param == "cuda":
        assert (fake.n_handles, fake.n_mapped) == (0, 0)


def geometries(store: GranuleStore) -> tuple[Geometry, Geometry]:
    """A thinker's with pages of one token, a talker's with rows that fill no granule."""
    size = store.granule_bytes
    return Geometry((128,) * 8, 1, size), Geometry((96, 96, 160, 160), 16, size)


class Buffers:
    """An ElasticMemory with its tensors, and what is expected in them."""

    def __init__(self, device, units: int, limit: int = 64, extra: int = 0, talker: bool = False):
        self.store = store_of(device)
        geometry = geometries(self.store)[talker]
        granules = units * geometry.granules + extra
        rows = limit * geometry.unit_rows
        self.memory = ElasticMemory(self.store, geometry, rows, granules)
        self.unit = geometry.granules
        self.tensors = [
            self.memory.tensor(at, (rows, n_bytes // 4), torch.float32)
            for at, n_bytes in enumerate(geometry.row_bytes)
        ]
        self.marks = torch.zeros(rows)
        self.write()

    @property
    def n_rows(self) -> int:
        return self.memory.units * self.memory.geometry.unit_rows

    def write(self) -> None:
        """Another number in every row."""
        self.marks[: self.n_rows] = torch.rand(self.n_rows)
        for at, tensor in enumerate(self.tensors):
            tensor[: self.n_rows] = (self.marks[: self.n_rows] + at)[:, None]

    def check(self, n_rows: int | None = None) -> None:
        n_rows = self.n_rows if n_rows is None else n_rows
        for at, tensor in enumerate(self.tensors):
            expected = (self.marks[:n_rows] + at)[:, None].expand(n_rows, tensor.shape[1])
            assert torch.equal(tensor[:n_rows], expected)
            if isinstance(self.store, FileGranules):  # what is not backed reads as zeros
                assert not tensor[self.n_rows :].any()

    def close(self) -> None:
        self.memory.close()


def receive(receiver: Buffers, passed: Passed) -> None:
    """As an engine does: the receiver's files are those of the message."""
    receiver.memory.receive(passed.runs, [os.dup(file) for file in passed.files])
    for file in passed.files:
        os.close(file)


def hand_over(giver: Buffers, receiver: Buffers, granules: int) -> None:
    receive(receiver, giver.memory.release(granules))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_unit_is_whole_pages_and_whole_granules(device):
    store = store_of(device)
    for geometry in geometries(store):
        for row_bytes, granules in zip(geometry.row_bytes, geometry.unit_granules, strict=True):
            assert geometry.unit_rows * row_bytes == granules * store.granule_bytes
        assert geometry.unit_rows % geometry.page_size == 0
        for tokens in (1, 100, 1024, 5000):
            assert geometry.tokens(geometry.units_for(tokens)) >= tokens
            assert geometry.units(tokens) == 1 or geometry.tokens(geometry.units(tokens)) <= tokens
    store.close()


def test_moves_in_any_order_lose_no_granule_and_no_row(device):
    rng = random.Random(6)
    one, two = Buffers(device, 12), Buffers(device, 6, extra=3, talker=True)
    total = one.memory.granules + two.memory.granules
    for _ in range(40):
        giver, receiver = rng.sample((one, two), 2)
        most = giver.memory.granules - giver.unit - giver.memory.n_spare
        if most < 1:
            continue
        kept = receiver.n_rows
        hand_over(giver, receiver, rng.randrange(1, min(most, 12 * giver.unit) + 1))
        giver.check()
        for tensor in receiver.tensors:  # neither side's old bytes arrive
            assert not tensor[kept : receiver.n_rows].any()
        receiver.check(kept)
        assert one.memory.granules + two.memory.granules == total
        receiver.write()
        receiver.check()
        giver.check()
    one.close()
    two.close()


def test_all_memory_can_return(device):
    one, two = Buffers(device, 8), Buffers(device, 8)
    hand_over(one, two, 7 * one.unit)
    assert (one.memory.units, two.memory.units) == (1, 15)
    hand_over(two, one, 7 * one.unit)
    assert (one.memory.units, two.memory.units) == (8, 8)
    for buffers in (one, two):
        if isinstance(buffers.store, FileGranules):
            assert buffers.store.n_files == 1
        buffers.close()


def test_memory_without_its_file_is_refused_and_changes_nothing(device):
    one, two = Buffers(device, 8), Buffers(device, 8)
    passed = one.memory.release(16)
    with pytest.raises(ValueError, match="files"):
        two.memory.receive(passed.runs, [])
    assert (two.memory.units, two.memory.n_spare) == (8, 0)
    two.check()
    receive(one, passed)
    assert one.memory.units == 8
    one.close()
    two.close()


def test_more_than_the_address_space_holds_is_kept_unmapped(device):
    one, two = Buffers(device, 30), Buffers(device, 8, limit=10)
    hand_over(one, two, 5 * one.unit)
    assert (two.memory.units, two.memory.n_spare) == (10, 3 * one.unit)
    hand_over(two, one, 5 * one.unit)
    assert (two.memory.units, two.memory.n_spare) == (8, 0)
    one.close()
    two.close()


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("n", [0, 3])
def test_a_driver_that_refuses_changes_nothing(monkeypatch, call, n):
    fake, before = FakeVmm().install(monkeypatch), open_files()
    one, two = Buffers(torch.device("cuda", 0), 8), Buffers(torch.device("cuda", 0), 8)
    passed = one.memory.release(2 * one.unit)
    handles, mapped = fake.n_handles, fake.n_mapped
    fake.calls_left = {call: n}
    with pytest.raises(OSError, match=call):
        two.memory.receive(passed.runs, [os.dup(file) for file in passed.files])
    assert (fake.n_handles, fake.n_mapped, two.memory.units) == (handles, mapped, 8)
    two.check()
    fake.calls_left = {}
    receive(two, passed)
    assert two.memory.units == 10
    one.close()
    two.close()
    assert (fake.n_handles, fake.n_mapped, open_files()) == (0, 0, before)


def test_memory_for_which_there_are_no_files_stays(monkeypatch):
    fake, before = FakeVmm().install(monkeypatch), open_files()
    one = Buffers(torch.device("cuda", 0), 8)
    fake.calls_left = {"cuMemExportToShareableHandle": 5}
    assert one.memory.release(2 * one.unit) == Passed([], ())
    assert (one.memory.units, one.memory.n_spare) == (6, 2 * one.unit)
    one.check()
    one.close()
    assert (fake.n_handles, open_files()) == (0, before)


def test_too_little_memory_leaves_none(monkeypatch):
    fake = FakeVmm().install(monkeypatch)
    fake.calls_left = {"cuMemCreate": 20}
    store = store_of(torch.device("cuda", 0))
    with pytest.raises(OSError, match="cuMemCreate"):
        ElasticMemory(store, geometries(store)[0], 10_000, 100)
    store.close()
    assert (fake.n_handles, fake.n_mapped) == (0, 0)


def test_memory_that_a_dead_process_had_is_freed():
    one = Buffers(torch.device("cpu"), 8)
    passed = one.memory.release(5 * one.unit)
    (file,) = passed.files
    os.pwrite(file, b"k" * GRANULE_BYTES, passed.runs[0].first * GRANULE_BYTES)
    one.memory.free_away()
    assert os.fstat(file).st_blocks * 512 == 3 * one.unit * GRANULE_BYTES
    os.close(file)
    one.check()
    one.close()


def test_a_write_behind_the_end_is_a_fault(device):
    one = Buffers(device, 8)
    passed = one.memory.release(one.unit)
    child = os.fork()
    if not child:
        faulthandler.disable()
        one.tensors[0][one.n_rows, 0] = 1.0
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    for file in passed.files:
        os.close(file)
    one.close()
