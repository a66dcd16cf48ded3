"""Granules move between memories, and every mapped row keeps what was written to it."""

import faulthandler
import os
import random
import signal

import pytest
import torch

from sglang_live.bridge.memory.elastic_memory import ElasticMemory, Geometry
from sglang_live.bridge.memory.granule_calls import GRANULE_BYTES, free_granules

THINKER = Geometry((128,) * 8, 1)
TALKER = Geometry((96, 96, 160, 160), 16)


class Buffers:
    """An ElasticMemory with its tensors, and what is expected in them."""

    def __init__(self, geometry: Geometry, units: int, limit: int = 64, extra: int = 0):
        granules = units * geometry.granules + extra
        rows = limit * geometry.unit_rows
        self.memory = ElasticMemory(geometry, rows, granules)
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
            assert not tensor[self.n_rows :].any()  # what is not backed reads as zeros

    def close(self) -> None:
        self.memory.close()


def hand_over(giver: Buffers, receiver: Buffers, granules: int) -> None:
    runs = giver.memory.release(granules)
    files = {os.fstat(f).st_ino: os.dup(f) for f in giver.memory.files_of(runs)}
    giver.memory.close_unused()
    for run in runs:
        free_granules(files[run.memory], run)
    receiver.memory.receive(runs, files)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("geometry", [THINKER, TALKER])
def test_a_unit_is_whole_pages_and_whole_granules(geometry):
    for row_bytes, granules in zip(geometry.row_bytes, geometry.unit_granules, strict=True):
        assert geometry.unit_rows * row_bytes == granules * GRANULE_BYTES
    assert geometry.unit_rows % geometry.page_size == 0
    for tokens in (1, 100, 1024, 5000):
        assert geometry.tokens(geometry.units_for(tokens)) >= tokens
        assert geometry.units(tokens) == 1 or geometry.tokens(geometry.units(tokens)) <= tokens


def test_moves_in_any_order_lose_no_granule_and_no_row():
    rng, before = random.Random(6), open_files()
    one, two = Buffers(THINKER, 20), Buffers(TALKER, 10, extra=3)
    total = one.memory.granules + two.memory.granules
    for _ in range(60):
        giver, receiver = rng.sample((one, two), 2)
        unit = giver.memory.geometry.granules
        most = giver.memory.granules - unit - giver.memory.n_spare
        if most < 1:
            continue
        kept = receiver.n_rows
        hand_over(giver, receiver, rng.randrange(1, min(most, 12 * unit) + 1))
        giver.check()
        for tensor in receiver.tensors:  # neither side's old bytes arrive
            assert not tensor[kept:].any()
        receiver.check(kept)
        assert one.memory.granules + two.memory.granules == total
        receiver.write()
        receiver.check()
        giver.check()
    for buffers in (one, two):
        assert buffers.memory.n_files <= 2
        buffers.close()
    assert open_files() == before


def test_all_memory_can_return():
    one, two = Buffers(THINKER, 8), Buffers(TALKER, 8)
    hand_over(one, two, 7 * THINKER.granules)
    assert (one.memory.units, two.memory.n_files) == (1, 2)
    hand_over(two, one, 7 * THINKER.granules)
    assert (one.memory.units, one.memory.n_files) == (8, 1)
    assert (two.memory.units, two.memory.n_files) == (8, 1)
    for buffers in (one, two):
        buffers.close()


def test_memory_without_its_file_is_refused_and_changes_nothing():
    one, two = Buffers(THINKER, 8), Buffers(TALKER, 8)
    runs = one.memory.release(16)
    with pytest.raises(ValueError, match="files of received memory are missing"):
        two.memory.receive(runs, {})
    assert (two.memory.units, two.memory.n_spare) == (8, 0)
    two.check()
    for buffers in (one, two):
        buffers.close()


def test_more_than_the_address_space_holds_is_kept_unmapped():
    one, two = Buffers(THINKER, 30), Buffers(THINKER, 8, limit=10)
    hand_over(one, two, 5 * THINKER.granules)
    assert (two.memory.units, two.memory.n_spare) == (10, 3 * THINKER.granules)
    hand_over(two, one, 5 * THINKER.granules)
    assert (two.memory.units, two.memory.n_spare) == (8, 0)
    for buffers in (one, two):
        buffers.close()


def test_memory_that_a_dead_process_had_is_freed():
    one = Buffers(THINKER, 8)
    runs = one.memory.release(5 * THINKER.granules)
    (file,) = one.memory.files_of(runs)
    blocks = os.fstat(file).st_blocks
    one.memory.free_away()
    assert os.fstat(file).st_blocks * 512 == 3 * THINKER.granules * GRANULE_BYTES
    assert blocks * 512 == 8 * THINKER.granules * GRANULE_BYTES
    one.check()
    one.close()


def test_a_write_behind_the_end_is_a_fault():
    one = Buffers(THINKER, 8)
    one.memory.release(THINKER.granules)
    child = os.fork()
    if not child:
        faulthandler.disable()
        one.tensors[0][one.n_rows, 0] = 1.0
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    one.close()
