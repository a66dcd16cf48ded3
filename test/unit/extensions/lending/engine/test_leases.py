"""Claims about lender and borrower in one process, over a real broker's files.

The pools are SGLang's allocators over real memory; only the engines around them are fakes.
"""

import os
import subprocess
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.allocator")
from sglang.srt.mem_cache.allocator import (  # noqa: E402
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)

from sglang_live.extensions.lending.channel import Bell, Member  # noqa: E402
from sglang_live.extensions.lending.engine.leases import Leases, PoolRuns  # noqa: E402
from sglang_live.extensions.lending.engine.shared_buffers import shared_buffers  # noqa: E402
from sglang_live.extensions.lending.layout import Geometry, Memory  # noqa: E402
from sglang_live.extensions.lending.meeting import BEGUN  # noqa: E402
from sglang_live.extensions.lending.policy import LendingConfig  # noqa: E402
from sglang_live.extensions.lending.table import BORROWERS, LeaseTable  # noqa: E402

TOTAL = 4096
RUN = 256
MEMBER = Member("lender", "/no/broker")
CONFIG = LendingConfig(future_tokens=512, cached_share=0.0, calm_s=0.0)
GEOMETRY = Geometry(
    dtype="float32", layout="nhd", n_layers=2, n_heads=2, k_dim=4, v_dim=4, page_size=1
)


class FakeKv:
    """A KV pool's buffers."""

    def __init__(self):
        shared, buffers = shared_buffers(
            [(TOTAL + 16, 2, 4)] * 4, torch.float32, torch.device("cpu")
        )
        self.k_buffer, self.v_buffer = buffers[:2], buffers[2:]
        self.shared = (
            shared.shared.fd,
            Memory(
                offsets=shared.offsets, row_bytes=shared.row_bytes, n_bytes=shared.shared.n_bytes
            ),
        )


class FakeTree:
    """A radix tree without leaves."""

    def evictable_size(self) -> int:
        return 0

    def evict(self, params) -> None:
        raise AssertionError("nothing is evictable")


def allocator_of(page: int, kv: FakeKv):
    if page == 1:
        return TokenToKVPoolAllocator(TOTAL, torch.float32, "cpu", kv, need_sort=False)
    return PagedTokenToKVPoolAllocator(TOTAL, page, torch.float32, "cpu", kv, need_sort=False)


class Lender:
    """A lender whose partner is a process that does nothing, and that partner's table."""

    def __init__(self, page: int):
        self.kv = FakeKv()
        self.allocator = allocator_of(page, self.kv)
        self.leases = Leases(self.allocator, FakeTree(), GEOMETRY, self.kv.shared, MEMBER, CONFIG)
        self.partner = subprocess.Popen(["sleep", "60"])
        self.meet(self.partner.pid)

    def meet(self, pid: int) -> None:
        _, (_, table_fd, _) = self.leases._link._introduction()
        fds = [os.dup(table_fd), Bell().fd, os.pidfd_open(pid)]
        self.leases._link._meet({"meets": "borrower", "pid": pid}, fds)
        self.table = LeaseTable(os.dup(table_fd))
        self.table.tell(BORROWERS, BEGUN)

    def rounds(self, n: int = 60, **facts) -> None:
        for _ in range(n):
            self.leases.step(**({"n_decoding": 0, "missing": 0} | facts))
            assert self.allocator.available_size() + self.leases.tokens + self.held == TOTAL

    held = 0

    def hold(self, n: int) -> None:
        taken = self.allocator.alloc(n)
        assert taken is not None
        self.held += n

    def accept_all(self) -> None:
        for lease in self.table.leases():
            self.table.accept(lease)

    def leave_recalled(self) -> int:
        recalled = [lease for lease in self.table.leases() if lease.recalled_ns]
        for lease in recalled:
            self.table.leave(lease)
        return len(recalled)


@pytest.fixture(params=[1, 16])
def lender(request):
    made = Lender(request.param)
    yield made
    made.partner.kill()
    made.partner.wait()


def test_an_idle_lender_keeps_its_reserve_and_a_run(lender):
    lender.rounds()
    assert lender.leases.tokens == RUN * ((TOTAL - 512 - RUN) // RUN)
    firsts = [lease.first for lease in lender.table.leases()]
    assert len(set(firsts)) == len(firsts)
    assert max(firsts) + RUN <= TOTAL + lender.allocator.page_size
    assert min(firsts) >= lender.allocator.page_size  # the padded page is never lent


def test_requests_that_need_room_recall_leases_and_find_it(lender):
    lender.rounds()
    lender.accept_all()
    lender.hold(768)
    lender.rounds(3)
    assert lender.leave_recalled() == 2
    lender.rounds()
    assert lender.allocator.available_size() >= 512
    assert lender.leases.report()["leases_returned"] == 2
    assert lender.leases.report()["recall_ms_max"] > 0


def test_a_borrower_that_does_not_answer_costs_the_lender_no_wait(lender):
    lender.rounds()
    lender.accept_all()
    lender.hold(768)
    lender.rounds(50)
    assert lender.leases.report()["leases_state_recalled"] == 2  # and no more than that
    assert lender.leases.report()["leases_returned"] == 0


def test_pages_return_soon_unless_the_borrower_does_not_answer(lender, monkeypatch):
    """Until then no request is retracted for another; afterwards it is, as without leases."""
    assert not lender.leases.returns_soon  # nothing is lent
    lender.rounds()
    lender.accept_all()
    assert lender.leases.returns_soon
    lender.rounds(1, missing=1)
    assert lender.leases.returns_soon
    later_s = time.monotonic() + 1
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert not lender.leases.returns_soon
    lender.leave_recalled()
    lender.rounds(1)
    assert lender.leases.returns_soon


def test_a_refused_request_recalls_a_lease_although_the_reserve_is_whole(lender):
    lender.rounds()
    lender.rounds(1, missing=1)
    assert lender.leave_recalled() == 1


def test_the_emptiest_lease_is_recalled_first(lender):
    lender.rounds()
    for n, lease in enumerate(lender.table.leases()):
        lender.table.accept(lease)
        lender.table.set_used(lease, 0 if n == 5 else 10)
    fifth = lender.table.leases()[5].row
    lender.rounds(1, missing=1)
    assert [one.row for one in lender.table.leases() if one.recalled_ns] == [fifth]


def test_pages_are_zero_when_they_are_offered_and_when_they_return(lender):
    for buffer in (*lender.kv.k_buffer, *lender.kv.v_buffer):
        buffer.fill_(3.0)  # what the lender's own requests left
    lender.rounds()
    leases = lender.table.leases()
    for buffer in (*lender.kv.k_buffer, *lender.kv.v_buffer):
        for lease in leases:
            assert not buffer[lease.first : lease.first + lease.n_slots].any()
            buffer[lease.first : lease.first + lease.n_slots] = float("nan")
    lender.accept_all()
    lender.rounds(1, missing=1)
    (recalled,) = [lease for lease in lender.table.leases() if lease.recalled_ns]
    lender.leave_recalled()
    lender.rounds(1)
    for buffer in lender.kv.k_buffer:
        assert not buffer[recalled.first : recalled.first + recalled.n_slots].any()


def test_a_run_is_offered_when_the_step_in_flight_has_ended(lender):
    """It may write to pages that a finished request has just freed."""
    lender.rounds(2)
    for buffer in lender.kv.k_buffer:
        buffer.fill_(5.0)
    assert lender.leases.tokens == RUN and lender.table.leases() == []
    lender.rounds(1)
    (lease,) = lender.table.leases()
    for buffer in lender.kv.k_buffer:
        assert not buffer[lease.first : lease.first + RUN].any()


def test_a_flush_of_the_lenders_cache_does_not_free_leases(lender):
    lender.rounds()
    leased = lender.leases.tokens
    lender.allocator.clear()
    assert lender.leases.tokens == leased
    assert lender.allocator.available_size() == TOTAL - leased
    own = lender.allocator.alloc(lender.allocator.available_size())
    for lease in lender.table.leases():
        assert not ((own >= lease.first) & (own < lease.first + lease.n_slots)).any()


def test_leases_of_a_dead_borrower_are_freed_when_its_process_has_ended(lender):
    lender.rounds()
    lender.accept_all()
    before = lender.leases.tokens
    lender.rounds(1)
    assert lender.leases.tokens == before
    lender.partner.kill()
    lender.partner.wait()
    lender.rounds()
    assert lender.leases.tokens == 0 and lender.leases.counts["borrowers_lost"] == 1
    again = subprocess.Popen(["sleep", "60"])
    lender.meet(again.pid)
    assert lender.table.leases() == []  # nothing of the last borrower's answers
    lender.rounds()
    assert lender.leases.tokens == before
    again.kill()
    again.wait()


def test_a_stopped_borrower_keeps_its_leases(lender):
    lender.rounds()
    lender.accept_all()
    before = lender.leases.tokens
    lender.partner.send_signal(19)  # SIGSTOP
    lender.rounds()
    assert lender.leases.tokens == before
    lender.partner.send_signal(18)


def test_a_fragmented_pool_lends_whole_runs_only():
    kv = FakeKv()
    allocator = allocator_of(1, kv)
    runs = PoolRuns(allocator)
    taken = allocator.alloc(TOTAL)
    allocator.free(taken[taken % 300 != 0])  # no run of 300 free slots is left
    n_free = allocator.available_size()
    assert runs.take(300) is None and allocator.available_size() == n_free
    first = runs.take(256)
    assert first is not None and allocator.available_size() == n_free - 256
    runs.put(first)
    assert allocator.available_size() == n_free


def test_a_fragmented_pool_is_not_searched_every_round(lender, monkeypatch):
    taken = lender.allocator.alloc(TOTAL)
    page = lender.allocator.page_size
    at = taken // page % 8 == 0
    lender.allocator.free(taken[~at])
    lender.held = int(at.sum())
    searches = []
    take = lender.leases._runs.take
    monkeypatch.setattr(lender.leases._runs, "take", lambda n: searches.append(n) or take(n))
    lender.rounds(20)
    assert len(searches) == 1 and lender.leases.tokens == 0
    later_s = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    lender.allocator.free(taken[at])
    lender.held = 0
    lender.rounds(3)
    assert lender.leases.tokens > 0


def test_the_highest_run_is_taken_so_that_the_lender_allocates_elsewhere():
    runs = PoolRuns(allocator := allocator_of(16, FakeKv()))
    assert runs.take(RUN) == TOTAL - RUN + 16
    assert int(allocator.alloc(16)[0]) == 16


def test_a_lender_without_a_borrower_lends_nothing():
    kv = FakeKv()
    leases = Leases(allocator_of(1, kv), FakeTree(), GEOMETRY, kv.shared, MEMBER, CONFIG)
    for _ in range(5):
        leases.step(0, 0)
    assert leases.tokens == 0 and SimpleNamespace(**leases.report()).tokens_lent == 0
