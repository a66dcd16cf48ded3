"""A process that lends memory and has no engine: what it offers, and to whom."""

import itertools
import os
import subprocess

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sglang_live.extensions.lending.channel import Bell  # noqa: E402
from sglang_live.extensions.lending.layout import Memory  # noqa: E402
from sglang_live.extensions.lending.lender import BLOCK_BYTES, LentMemory  # noqa: E402
from sglang_live.extensions.lending.meeting import BEGUN  # noqa: E402
from sglang_live.extensions.lending.table import BORROWERS, N_ROWS, LeaseTable  # noqa: E402

N_BLOCKS = 200
CPU = torch.device("cpu")


class Borrower:
    """A process that does nothing, and what each of its ranks was given."""

    def __init__(self, lent: LentMemory):
        self.process, self.bell = subprocess.Popen(["sleep", "60"]), Bell()
        message, (_, table_fd, _) = lent.link._introduction()
        self.memory = Memory(
            offsets=message["offsets"], row_bytes=message["row_bytes"], n_bytes=message["n_bytes"]
        )
        self.memory_fds, self.tables, pid = [], [], self.process.pid
        n_ranks = len(lent.links)
        for rank, link in enumerate(lent.links):
            _, (memory_fd, _, _) = link._introduction()
            self.memory_fds.append(memory_fd)
            self.tables.append(LeaseTable(os.dup(table_fd), n_ranks, rank))
            fds = [os.dup(table_fd), os.dup(self.bell.fd), os.pidfd_open(pid)]
            link._meet({"meets": "borrower", "pid": pid}, fds)
        self.memory_fd, self.table = self.memory_fds[0], self.tables[0]
        if lent.link.table.n_ranks == 1:
            self.table.tell(BORROWERS, BEGUN)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def lent():
    made = LentMemory("lender", N_BLOCKS * BLOCK_BYTES + 17, "/no/broker", CPU)
    yield made
    made.close()


@pytest.fixture
def meet(lent):
    met: list[Borrower] = []

    def one() -> Borrower:
        met.append(Borrower(lent))
        return met[-1]

    yield one
    for borrower in met:
        borrower.end()


def test_all_whole_blocks_are_offered_once(lent, meet):
    borrower = meet()
    for _ in range(5):
        lent.step()
    leases = borrower.table.leases()
    assert sum(lease.n_slots for lease in leases) == N_BLOCKS
    ranges = sorted(
        one for lease in leases for one in borrower.memory.ranges(lease.first, lease.n_slots)
    )
    assert (ranges[0][0], ranges[-1][1]) == (0, N_BLOCKS * BLOCK_BYTES)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert not any(lease.recalled_ns for lease in leases)


def test_nothing_is_offered_before_there_is_a_borrower(lent):
    lent.step()
    assert lent.load()["lent_bytes"] == 0


def test_memory_takes_none_of_the_systems_until_it_is_written(lent, meet):
    borrower = meet()
    lent.step()
    assert lent.load()["lent_bytes"] == N_BLOCKS * BLOCK_BYTES
    assert lent.load()["lent_bytes_resident"] == 0
    os.pwrite(borrower.memory_fd, b"x" * BLOCK_BYTES, 3 * BLOCK_BYTES)
    assert lent.load()["lent_bytes_resident"] == pytest.approx(BLOCK_BYTES, abs=1 << 16)


def test_the_next_borrower_finds_zeros_and_no_answers_of_the_last(lent, meet):
    first = meet()
    lent.step()
    for lease in first.table.leases():
        first.table.accept(lease)
    assert lent.load()["leases_state_active"] == len(first.table.leases())
    os.pwrite(first.memory_fd, b"secret" * 1000, 5 * BLOCK_BYTES)
    first.end()
    lent.step()
    assert lent.link.partner is None
    second = meet()
    lent.step()
    assert len(second.table.leases()) == len(first.table.leases())
    load = lent.load()
    assert (load["leases_state_active"], load["borrowers_lost"]) == (0, 1)
    stored = os.pread(second.memory_fd, N_BLOCKS * BLOCK_BYTES, 0)
    assert not np.frombuffer(stored, np.uint8).any()


def test_a_second_borrower_is_not_met_while_the_first_is_there(lent, meet):
    first = meet()
    n_files = len(os.listdir("/proc/self/fd"))
    second = meet()
    # Its bell, and its mapping of the table; what the lender was sent is closed.
    assert len(os.listdir("/proc/self/fd")) == n_files + 2
    lent.step()
    assert lent.link.partner is not None
    assert lent.link.partner.pid == first.process.pid
    assert second.table.leases() == first.table.leases()


def test_more_memory_has_larger_leases_not_more_rows():
    lent = LentMemory("large", 64 * (N_ROWS + 1) * BLOCK_BYTES, "/no/broker", CPU)
    borrower = Borrower(lent)
    lent.step()
    leases = borrower.table.leases()
    assert len(leases) <= N_ROWS
    assert sum(lease.n_slots for lease in leases) == 64 * (N_ROWS + 1)
    borrower.end()
    lent.close()


def test_each_rank_of_a_borrower_has_a_memory_of_its_own():
    lent = LentMemory("ranks", 2 * N_BLOCKS * BLOCK_BYTES, "/no/broker", CPU, 2)
    borrower = Borrower(lent)
    lent.step()
    assert lent.load()["lent_bytes"] == 0  # its ranks have not all met
    borrower.table.tell(BORROWERS, BEGUN)
    lent.step()
    leases = borrower.table.leases()
    assert sum(lease.n_slots for lease in leases) == N_BLOCKS
    assert lent.load()["lent_bytes"] == 2 * N_BLOCKS * BLOCK_BYTES
    for fd, letter in zip(borrower.memory_fds, b"ab", strict=True):
        os.pwrite(fd, bytes([letter]) * BLOCK_BYTES, 0)
    assert [os.pread(fd, 1, 0) for fd in borrower.memory_fds] == [b"a", b"b"]
    assert lent.load()["lent_bytes_resident"] == pytest.approx(2 * BLOCK_BYTES, abs=1 << 16)
    borrower.end()
    lent.step()
    assert lent.load()["borrowers_lost"] == 1 and lent.load()["lent_bytes_resident"] == 0
    assert all(link.meeting is None for link in lent.links)
    lent.close()
