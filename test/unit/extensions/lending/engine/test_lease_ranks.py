"""Claims about a lender and a borrower of several ranks that run their rounds at different times.

Leases, Borrowing, their tables and memories are the real ones; the engines around them are fakes,
whose ranks do the same in the same round, and whose rank 0 may be some rounds ahead of the others.
"""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.allocator")
from sglang_live.extensions.lending.channel import Bell, Member  # noqa: E402
from sglang_live.extensions.lending.engine.borrowing import Borrowing  # noqa: E402
from sglang_live.extensions.lending.engine.leases import Leases  # noqa: E402
from sglang_live.extensions.lending.policy import LendingConfig  # noqa: E402
from test.unit.extensions.lending.engine.test_borrowing import FakeCopies, FakeEviction  # noqa: E402
from test.unit.extensions.lending.engine.test_leases import (  # noqa: E402
    GEOMETRY,
    TOTAL,
    FakeKv,
    FakeTree,
    allocator_of,
)

N_RANKS = 2
CONFIG = LendingConfig(future_tokens=512, cached_share=0.0, calm_s=0.0, n_runs=8)
RUN = TOTAL // 8


class FakePartner:
    """A process that ends when the test says so."""

    name, pid = "partner", 1

    def __init__(self):
        self.bell, self.has_ended = self, False

    def ring(self) -> None:
        """Rounds run when the test says so."""

    def close(self) -> None:
        """There is no file."""


@dataclass
class Rounds:
    """Rounds of an engine's ranks, and what each had after them.

    ops: what happens on all ranks, by round.
    told: what rank 0 has told in each round, which a rank acts on in its own round of that number.
    """

    ops: list = field(default_factory=list)
    told: list = field(default_factory=list)
    after: list[list] = field(default_factory=lambda: [[] for _ in range(N_RANKS)])

    def number(self, rank: int) -> int:
        return len(self.after[rank])

    def may_run(self, rank: int) -> bool:
        return rank == 0 or self.number(rank) < self.number(0)

    def begin(self, rank: int, leases, ops: list) -> int:
        number = self.number(rank)
        if rank == 0:
            self.told.append(leases.facts_to_tell())
            self.ops.append(ops[number % len(ops)])
        if self.told[number] is not None:
            leases.told(self.told[number])
        return number

    def check(self) -> None:
        for other in self.after[1:]:
            assert other == self.after[0][: len(other)]


class LenderRank:
    def __init__(self, rank: int):
        self.kv = FakeKv()
        self.allocator = allocator_of(1, self.kv)
        member = Member("lender", "/no/broker", rank, N_RANKS)
        self.leases = Leases(self.allocator, FakeTree(), GEOMETRY, self.kv.shared, member, CONFIG)
        self.held = None

    def round(self, wanted: int, number: int) -> tuple:
        """wanted: tokens that requests hold from now on."""
        if self.held is not None:
            self.allocator.free(self.held)
        n_held = min(wanted, self.allocator.available_size())
        self.held = self.allocator.alloc(n_held) if n_held else None
        self.leases.step(0, missing=wanted - n_held)
        assert self.allocator.available_size() + self.leases.tokens + n_held == TOTAL
        rows = {row: (run.first, run.recalled_s) for row, run in self.leases._rows.items()}
        return sorted(self.runs.items()), rows, self.leases.counts.copy()

    @property
    def runs(self) -> dict[int, int]:
        """First slots of runs that the allocator does not have, with their lengths."""
        return self.leases._runs._out


class BorrowerRank:
    def __init__(self, rank: int):
        self.copies = FakeCopies()
        self.eviction = FakeEviction(self.copies)
        member = Member("borrower", "/no/broker", rank, N_RANKS)
        device = SimpleNamespace(store_dtype=torch.float32, k_buffer=[torch.zeros(1)])
        self.leases = Borrowing(self.copies, self.eviction, GEOMETRY, device, member)

    def round(self, op: tuple[str, int], number: int) -> tuple:
        """op: what happens to copies."""
        what, n = op
        names = sorted(self.copies._copies)
        if what == "put" and self.copies.slots.n_free >= n:
            self.copies.put(f"session-{number}", n)
        elif names and what == "forget":
            self.copies._copies[name := names[n % len(names)]].busy.clear()
            self.copies.forget(name)
        elif names and what == "begin":
            self.copies.of(names[n % len(names)]).busy.add(number)
        elif what == "end":
            for name in names:
                self.copies.of(name).busy.clear()
        self.leases.step()
        used = {name: copy.slots.tolist() for name, copy in self.copies._copies.items()}
        return used, self.held, self.leases.counts.copy(), self.copies.slots.n_free

    @property
    def held(self) -> list[tuple[int, int]]:
        """First slots of leases that it has not left, with their lengths."""
        lenders = self.leases._lenders.values()
        leases = [lease for lender in lenders for lease in lender.held.values()]
        return sorted((lease.first, lease.n_slots) for lease in leases)


class Pair:
    """A lender and a borrower, introduced rank by rank."""

    def __init__(self):
        self.lenders = [LenderRank(rank) for rank in range(N_RANKS)]
        self.borrowers = [BorrowerRank(rank) for rank in range(N_RANKS)]
        self.rounds = {"lend": Rounds(), "borrow": Rounds()}
        self.partners: dict[str, list[FakePartner]] = {"lend": [], "borrow": []}
        for rank in range(N_RANKS):
            self._introduce(rank)

    def _introduce(self, rank: int) -> None:
        lender, borrower = self.lenders[rank].leases, self.borrowers[rank].leases
        message, (memory_fd, _, _) = lender._link._introduction()
        _, (_, table_fd, _) = self.lenders[0].leases._link._introduction()
        own = os.getpid()
        fds = [os.dup(memory_fd), os.dup(table_fd), Bell().fd, os.pidfd_open(own)]
        borrower._meet({**message, "meets": "lender", "pair": "pair"}, fds, 0.0)
        fds = [os.dup(table_fd), Bell().fd, os.pidfd_open(own)]
        lender._link._meet({"meets": "borrower", "pid": own}, fds)
        for side, meeting in (
            ("lend", lender._link.meeting),
            ("borrow", borrower._met["pair"].meeting),
        ):
            meeting.partner.close()
            meeting.partner = FakePartner()
            self.partners[side].append(meeting.partner)

    def run(self, side: str, rank: int, ops: list) -> None:
        rounds = self.rounds[side]
        if rounds.may_run(rank):
            one = (self.lenders if side == "lend" else self.borrowers)[rank]
            number = rounds.begin(rank, one.leases, ops)
            rounds.after[rank].append(one.round(rounds.ops[number], number))
            rounds.check()
            self.check()

    def check(self) -> None:
        """What a rank of the borrower uses has been offered, and not taken back, by all ranks."""
        for lender in self.lenders:
            lent = {run.first: run.n_slots for run in lender.leases._rows.values()}
            assert lent.items() <= lender.runs.items()
            for borrower in self.borrowers:
                assert set(borrower.held) <= set(lent.items())

    def run_all(self, n: int, lent: list, borrowed: list) -> None:
        """Run rank 1 up to the round of rank 0, and then n rounds of both."""
        ops = {"lend": lent, "borrow": borrowed}
        for side, rounds in self.rounds.items():
            while rounds.may_run(1):
                self.run(side, 1, ops[side])
        for _ in range(n):
            for rank in range(N_RANKS):
                for side in self.rounds:
                    self.run(side, rank, ops[side])

    def end(self) -> None:
        for rank in (*self.lenders, *self.borrowers):
            rank.leases.bell.close()
        for rank in self.lenders:
            rank.leases._link._own_table.close()
            os.close(rank.kv.shared[0])


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.end()


def test_a_lease_is_used_when_all_ranks_have_offered_it(pair):
    """Rank 1 of the lender wipes its pages later."""
    pair.run("lend", 0, [0])
    pair.run("borrow", 0, [("end", 0)])
    pair.run("borrow", 1, [("end", 0)])
    for _ in range(4):
        pair.run("lend", 0, [0])
        pair.run("borrow", 0, [("end", 0)])
        pair.run("borrow", 1, [("end", 0)])
    assert pair.lenders[0].leases.counts["leases_offered"] > 0
    assert pair.borrowers[0].held == []
    pair.run_all(3, [0], [("end", 0)])
    assert pair.borrowers[0].held == pair.borrowers[1].held != []


def test_pages_return_when_all_ranks_have_left_them(pair):
    pair.run_all(30, [0], [("put", 10)])
    n_lent = len(pair.lenders[0].runs)
    assert n_lent == (TOTAL - 512 - RUN) // RUN == len(pair.borrowers[1].held)
    for _ in range(5):  # rank 1 of the borrower is late
        pair.run("lend", 0, [TOTAL // 2])
        pair.run("lend", 1, [TOTAL // 2])
        pair.run("borrow", 0, [("end", 0)])
    assert len(pair.borrowers[0].held) < n_lent == len(pair.lenders[0].runs)
    pair.run_all(3, [TOTAL // 2], [("end", 0)])
    assert len(pair.lenders[0].runs) == len(pair.lenders[1].runs) < n_lent


def test_all_ranks_recall_the_lease_that_rank_0_found_the_emptiest(pair):
    pair.run_all(30, [0], [("put", 10)])
    pair.run("lend", 0, [TOTAL // 2])
    for _ in range(60):  # the first lease is the fullest, and becomes empty
        for rank in range(N_RANKS):
            pair.run("borrow", rank, [("forget", 0)])
    pair.run("lend", 1, [TOTAL // 2])
    recalled = [
        {row for row, run in lender.leases._rows.items() if run.recalled_s is not None}
        for lender in pair.lenders
    ]
    assert recalled[0] == recalled[1] != set()


def test_the_death_of_one_rank_of_a_lender_is_the_lenders(pair):
    pair.run_all(30, [0], [("put", 10)])
    pair.partners["borrow"][1].has_ended = True
    for _ in range(3):
        pair.run("borrow", 0, [("begin", 0)])
    assert pair.borrowers[0].held != []  # rank 1 has not told yet
    for _ in range(4):
        for rank in (1, 0):
            pair.run("borrow", rank, [("end", 0)])
    for borrower in pair.borrowers:
        assert borrower.held == [] and borrower.leases.counts["lenders_lost"] == 1
        assert borrower.copies.lenders == [] and borrower.eviction.moved


def test_pages_of_a_dead_borrower_are_free_when_all_its_ranks_have_ended(pair):
    pair.run_all(30, [0], [("put", 10)])
    pair.partners["lend"][0].has_ended = True
    for _ in range(5):
        for rank in range(N_RANKS):
            pair.run("lend", rank, [0])
    assert pair.lenders[0].leases.tokens > 0  # rank 1 may still write
    pair.partners["lend"][1].has_ended = True
    for borrower in pair.borrowers:
        borrower.leases._lenders.clear()
    for _ in range(20):
        for rank in range(N_RANKS):
            pair.run("lend", rank, [0])
    for lender in pair.lenders:
        assert lender.leases.tokens == 0 and lender.leases.counts["borrowers_lost"] == 1
        assert lender.allocator.available_size() == TOTAL


RANK_STEPS = st.lists(
    st.tuples(st.sampled_from(["lend", "borrow"]), st.integers(0, N_RANKS - 1)), max_size=80
)
LENT = st.lists(st.sampled_from([0, 0, 100, 900, 1800, TOTAL]), min_size=1, max_size=12)
BORROWED = st.lists(
    st.tuples(st.sampled_from(["put", "put", "forget", "begin", "end"]), st.integers(1, 40)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps=RANK_STEPS, lent=LENT, borrowed=BORROWED, dies=st.sampled_from(["", *"lb"]))
def test_ranks_do_the_same_in_each_round_whenever_they_run_it(steps, lent, borrowed, dies):
    pair = Pair()
    try:
        pair.run_all(6, [0], [("put", 5)])  # some leases, in use
        for side, rank in steps:
            pair.run(side, rank, lent if side == "lend" else borrowed)
        if dies == "l":
            for partner in pair.partners["borrow"]:
                partner.has_ended = True
            pair.run_all(3, [0], [("end", 0)])
            assert all(one.held == [] and not one.copies.lenders for one in pair.borrowers)
            assert all(one.copies.slots.n_open == 0 for one in pair.borrowers)
        elif dies == "b":
            for one in pair.borrowers:
                one.leases._lenders.clear()
            for partner in pair.partners["lend"]:
                partner.has_ended = True
            for rank in [0, 1] * 20 + [1] * 120:
                pair.run("lend", rank, [0])
            assert all(one.leases.tokens == 0 for one in pair.lenders)
        else:
            pair.run_all(30, [0], [("end", 0)])
            assert pair.lenders[0].runs.keys() == {first for first, _ in pair.borrowers[0].held}
    finally:
        pair.end()
