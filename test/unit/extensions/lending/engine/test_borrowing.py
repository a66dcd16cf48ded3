"""Claims about how a borrower accepts, drains and leaves leases.

Lender and borrower share real memory and a real table; the lender's process is one that sleeps.
"""

import os
import subprocess
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.managers.cache_controller")
from lab.attachment import around  # noqa: E402
from lab.lending import forget_lease  # noqa: E402
from sglang_live.bridge.tiers.session_copies import SessionCopy  # noqa: E402
from sglang_live.extensions.lending.channel import Bell, Member  # noqa: E402
from sglang_live.extensions.lending.engine.borrowing import RECALL_S, Borrowing  # noqa: E402
from sglang_live.extensions.lending.engine.peer_pool import PEER_SLOTS  # noqa: E402
from sglang_live.extensions.lending.engine.shared_buffers import shared_buffers  # noqa: E402
from sglang_live.extensions.lending.layout import Geometry  # noqa: E402
from sglang_live.extensions.lending.meeting import UNMET  # noqa: E402
from sglang_live.extensions.lending.slots import PeerSlots  # noqa: E402
from sglang_live.extensions.lending.table import BORROWERS, LeaseTable  # noqa: E402

GEOMETRY = Geometry(
    dtype="float32", layout="nhd", n_layers=2, n_heads=1, k_dim=8, v_dim=8, page_size=1
)
N_LENT = 64


class FakeCopies:
    """Copies by session, in real slots of leases."""

    def __init__(self):
        self.slots, self._copies, self.lenders = PeerSlots(), {}, []

    def add_lender(self, pool) -> int:
        self.lenders.append(PEER_SLOTS * (len(self.lenders) + 1))
        return self.lenders[-1]

    def remove_lender(self, base: int) -> None:
        self.lenders.remove(base)

    def of(self, session_id: str):
        return self._copies.get(session_id)

    def sessions_in(self, lease) -> list[str]:
        return [
            name
            for name, copy in self._copies.items()
            if self.slots.touches(lease, copy.slots.numpy())
        ]

    def put(self, session_id: str, n: int) -> SessionCopy:
        copy = SessionCopy(0, n, torch.from_numpy(self.slots.take(n)))
        self._copies[session_id] = copy
        return copy

    def forget(self, session_id: str) -> None:
        self.slots.free(self._copies.pop(session_id).slots.numpy())


class FakeEviction:
    """Moves copies at once. Sessions are expected in the order of their names."""

    def __init__(self, copies: FakeCopies):
        self._copies, self.moved, self.dropped = copies, [], []
        self.on_device: dict[str, int] = {}
        self.host_rate: float | None = None

    def by_next_use(self, names: list[str]) -> list[str]:
        return sorted(names)

    def n_on_device(self, name: str) -> int:
        return self.on_device.get(name, 0)

    def move(self, name: str, *, may_drop: bool) -> bool:
        assert may_drop
        self._copies.forget(name)
        self.moved.append(name)
        return True

    def drop(self, name: str) -> None:
        self._copies.forget(name)
        self.dropped.append(name)


class Pair:
    n_bytes = 0  # that the lender says its memory has, if not what it has

    def __init__(self):
        self.copies = FakeCopies()
        self.eviction = FakeEviction(self.copies)
        device = SimpleNamespace(store_dtype=torch.float32, k_buffer=[torch.zeros(1)])
        self.leases = Borrowing(
            self.copies, self.eviction, GEOMETRY, device, Member("borrower", "/no/broker")
        )
        self.processes = []
        self.meet()

    def meet(self) -> None:
        shape, cpu = (256, 2, 8), torch.device("cpu")
        memory, self.buffers = shared_buffers([shape] * 4, torch.float32, cpu)
        self.table, self.bell = LeaseTable(), Bell()
        self.lender = subprocess.Popen(["sleep", "60"])
        self.processes.append(self.lender)
        message = {
            "meets": "lender",
            "pair": f"pair {self.lender.pid}",
            "pid": self.lender.pid,
            "kind": "cpu",
            "offsets": list(memory.offsets),
            "row_bytes": list(memory.row_bytes),
            "n_bytes": self.n_bytes or memory.shared.n_bytes,
        }
        fds = [memory.shared.fd, os.dup(self.table.fd), os.dup(self.bell.fd), self._pidfd()]
        self.leases._meet(message, fds, time.monotonic())

    def _pidfd(self) -> int:
        return os.pidfd_open(self.lender.pid)

    def offer(self, first: int = 16) -> int:
        row = self.table.offer(first, N_LENT)
        self.leases.step()
        return row

    def kill(self) -> None:
        self.lender.kill()
        self.lender.wait()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def test_an_offered_lease_is_used_and_its_use_is_told(pair):
    row = pair.offer()
    assert pair.table.is_active(row)
    assert pair.copies.slots.n_free == 4 * (N_LENT * 64 // GEOMETRY.envelope_bytes)
    pair.copies.put("a", 20)
    pair.leases.step()
    assert pair.table.used(row) == 20


def test_with_memory_that_the_device_cannot_map_no_pair_begins(pair):
    """The lender then offers nothing, and keeps its pages."""
    pair.n_bytes = 1 << 60
    pair.meet()
    row = pair.offer()
    assert pair.table.states(BORROWERS)[0] == UNMET
    assert not pair.table.is_active(row) and pair.copies.slots.n_open == 0
    assert pair.leases.counts["lenders_refused"] == 1


def test_an_empty_lease_is_left_at_once(pair):
    row = pair.offer()
    assert os.eventfd_read(pair.bell.fd) == 1  # the pair has begun
    pair.table.recall(row, time.monotonic_ns())
    pair.leases.step()
    assert pair.table.has_left(row) and pair.copies.slots.n_open == 0
    assert os.eventfd_read(pair.bell.fd) == 1  # the lender is woken


def test_a_lease_that_is_recalled_before_it_was_seen_is_left(pair):
    row = pair.table.offer(16, N_LENT)
    pair.table.recall(row, time.monotonic_ns())
    pair.leases.step()
    assert pair.table.has_left(row) and not pair.leases.is_draining


def test_a_recalled_lease_is_left_when_its_copies_have_moved(pair):
    row = pair.offer()
    pair.copies.put("a", 10)
    pair.table.recall(row, time.monotonic_ns())
    pair.leases.step()
    assert pair.eviction.moved == ["a"] and pair.table.has_left(row)


def test_a_busy_copy_delays_the_answer_and_nothing_else_is_taken(pair):
    row = pair.offer()
    pair.copies.put("a", 10).busy.add(-1)
    pair.table.recall(row, time.monotonic_ns())
    for _ in range(3):
        pair.leases.step()
        assert not pair.table.has_left(row) and pair.leases.is_draining
        assert pair.copies.slots.take(1) is None
    pair.copies.of("a").busy.clear()
    pair.leases.step()
    assert pair.table.has_left(row) and not pair.leases.is_draining


def test_what_does_not_fit_into_the_deadline_is_dropped_last_use_first(pair):
    row = pair.offer()
    for name in "bca":
        pair.copies.put(name, 10)
    copy_bytes = 10 * GEOMETRY.envelope_bytes
    pair.eviction.host_rate = copy_bytes / (RECALL_S / 5)  # two of three within half of the time
    pair.table.recall(row, time.monotonic_ns())
    pair.leases.step()
    assert (pair.eviction.moved, pair.eviction.dropped) == (["a", "b"], ["c"])


def test_copies_that_the_device_has_cost_no_time(pair):
    row = pair.offer()
    for name in "abc":
        pair.copies.put(name, 10)
        pair.eviction.on_device[name] = 10
    pair.eviction.host_rate = 1.0
    pair.table.recall(row, time.monotonic_ns())
    pair.leases.step()
    assert pair.eviction.dropped == [] and len(pair.eviction.moved) == 3


def test_other_leases_stay_when_one_is_recalled(pair):
    first, second = pair.offer(16), pair.offer(100)
    pair.copies.put("a", 10)
    pair.table.recall(first, time.monotonic_ns())
    pair.leases.step()
    assert pair.table.has_left(first) and pair.table.is_active(second)


def test_copies_of_a_dead_lender_move_without_a_deadline_and_its_memory_is_unmapped(pair):
    pair.offer()
    pair.copies.put("a", 10)
    pair.copies.put("b", 10).busy.add(-1)
    pair.eviction.host_rate = 1.0  # too slow for any deadline
    pair.kill()
    pair.leases.step()
    assert pair.eviction.moved == ["a"] and pair.copies.lenders
    assert pair.leases.report()["tokens_in_dead_lenders"] == 10
    pair.copies.of("b").busy.clear()
    pair.leases.step()
    assert pair.eviction.moved == ["a", "b"] and not pair.copies.lenders
    assert pair.leases.report()["lenders_lost"] == 1


def test_a_lender_that_comes_back_is_another_one(pair):
    pair.offer()
    pair.kill()
    pair.leases.step()
    pair.meet()
    row = pair.offer()
    assert pair.table.is_active(row) and pair.copies.lenders == [PEER_SLOTS]


def test_pages_are_poisoned_for_tests_before_they_return(monkeypatch):
    monkeypatch.setattr(Borrowing, "_forget", Borrowing._forget)  # to be restored
    around(Borrowing, "_forget", forget_lease)
    pair = Pair()
    row = pair.offer(16)
    pair.table.recall(row, time.monotonic_ns())
    pair.leases.step()
    for buffer in pair.buffers:
        assert buffer[16 : 16 + N_LENT].isnan().all()
        assert not buffer[:16].isnan().any() and not buffer[16 + N_LENT :].isnan().any()
    pair.kill()
