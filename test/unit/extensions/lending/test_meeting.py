"""Claims about ranks that meet another engine, and see its end, each at its own time."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.extensions.lending.meeting import (
    BEGUN,
    DROPPED,
    ENDED,
    MEET_S,
    MET,
    UNMET,
    Meeting,
)
from sglang_live.extensions.lending.table import BORROWERS, LENDERS, LeaseTable

N_RANKS = 3


class FakePartner:
    """A process that ends when the test says so."""

    has_ended, n_rings = False, 0

    @property
    def bell(self) -> "FakePartner":
        return self

    def ring(self) -> None:
        self.n_rings += 1


class Ranks:
    """The ranks of one engine, rank 0 of which tells the others that the pair begins."""

    def __init__(self, shared: LeaseTable, side: int = BORROWERS):
        self.side, self.now_s, n_ranks = side, 0.0, shared.n_ranks
        self.tables = [LeaseTable(os.dup(shared.fd), n_ranks, rank) for rank in range(n_ranks)]
        self.meetings: list[Meeting | None] = [None] * n_ranks
        self.partners = [FakePartner() for _ in range(n_ranks)]
        self.dropped = [False] * n_ranks
        self.told: set[int] = set()  # ranks that will hear that the pair begins

    def meet(self, rank: int) -> None:
        if self.meetings[rank] is None and not self.dropped[rank]:
            table, partner = self.tables[rank], self.partners[rank]
            self.meetings[rank] = Meeting(partner, table, self.side, self.now_s)

    def look(self, rank: int) -> None:
        """Part of a round; rank 0 begins, and others drop a pair that does not."""
        meeting = self.meetings[rank]
        if meeting is None:
            return
        meeting.look(self.now_s)
        if meeting.is_over:
            assert rank not in self.told, "a rank has dropped a pair that begins"
            self.meetings[rank], self.dropped[rank] = None, True
        elif rank == 0 and not meeting.has_begun and meeting.can_begin:
            meeting.begin()
            self.told = set(range(1, len(self.meetings)))

    def hear(self, rank: int) -> None:
        if rank in self.told:
            self.told.remove(rank)
            meeting = self.meetings[rank]
            assert meeting is not None, "a pair begins that a rank does not know"
            meeting.begin()

    @property
    def begun(self) -> list[bool]:
        return [meeting is not None and meeting.has_begun for meeting in self.meetings]

    def state(self, rank: int = 0) -> int:
        return self.tables[0].states(self.side)[rank]


@pytest.fixture
def shared():
    table = LeaseTable(n_ranks=N_RANKS)
    yield table
    table.close()


def test_a_borrower_begins_when_all_its_ranks_have_met(shared):
    ranks = Ranks(shared)
    for rank in (0, 2):
        ranks.meet(rank)
        ranks.look(0)
        assert not any(ranks.begun)
    ranks.meet(1)
    ranks.look(0)
    assert ranks.begun == [True, False, False] and ranks.told == {1, 2}
    assert ranks.state() == BEGUN and ranks.partners[0].n_rings == 1


def test_a_lender_begins_after_its_borrower(shared):
    """Otherwise it could lend to one that does not begin, and returns nothing."""
    lender, borrower = Ranks(shared, LENDERS), Ranks(shared)
    for rank in range(N_RANKS):
        lender.meet(rank)
        borrower.meet(rank)
    lender.look(0)
    assert lender.begun == [False] * N_RANKS
    borrower.look(0)
    lender.look(0)
    assert lender.begun[0]


def test_a_single_rank_begins_at_once_and_its_lender_after_it():
    table = LeaseTable()
    lender, borrower = Ranks(table, LENDERS), Ranks(table, BORROWERS)
    lender.meet(0)
    lender.look(0)
    assert lender.begun == [False]
    borrower.meet(0)
    borrower.look(0)
    lender.look(0)
    assert borrower.begun == lender.begun == [True]
    table.close()


def test_a_rank_that_sees_the_end_first_tells_the_others(shared):
    ranks = Ranks(shared)
    for rank in range(N_RANKS):
        ranks.meet(rank)
    ranks.look(0)
    meeting = ranks.meetings[0]
    assert meeting is not None and not meeting.any_ended
    ranks.partners[2].has_ended = True
    ranks.look(2)
    assert meeting.any_ended and not meeting.all_ended
    for rank in (0, 1):
        ranks.partners[rank].has_ended = True
        ranks.look(rank)
    assert meeting.all_ended and ranks.begun[0]


def test_ranks_drop_a_pair_that_one_of_them_never_met(shared):
    ranks = Ranks(shared)
    for rank in (0, 1):
        ranks.meet(rank)
        ranks.look(rank)
    ranks.now_s = MEET_S + 0.1
    ranks.look(1)
    assert not ranks.dropped[1]  # rank 0 has met, and decides
    ranks.look(0)
    ranks.look(1)
    assert ranks.dropped == [True, True, False]
    ranks.meet(2)
    ranks.look(2)
    assert ranks.dropped == [True, True, True]


def test_ranks_drop_a_pair_that_rank_0_never_met(shared):
    ranks = Ranks(shared)
    ranks.meet(1)
    ranks.now_s = MEET_S + 0.1
    ranks.look(1)
    assert ranks.dropped[1] and shared.states(BORROWERS) == [UNMET, ENDED, UNMET]
    ranks.meet(0)
    ranks.meet(2)
    ranks.look(0)
    ranks.look(2)
    assert ranks.dropped == [True, True, True]
    assert shared.states(BORROWERS) == [DROPPED, ENDED, MET]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["meet", "meet", "look", "look", "hear", "end", "wait"]),
        st.sampled_from([LENDERS, BORROWERS]),
        st.integers(0, N_RANKS - 1),
    )
)
MUTE = st.lists(st.booleans(), min_size=N_RANKS, max_size=N_RANKS)


@given(steps=STEPS, is_mute=st.one_of(st.just([[False] * N_RANKS] * 2), st.tuples(MUTE, MUTE)))
def test_all_ranks_begin_or_none_does_whatever_each_sees_when(steps, is_mute):
    """is_mute: the broker's messages to these ranks of a side are lost.

    A lender begins only with a borrower that has; if it does not, its borrower sees that it ends.
    """
    shared = LeaseTable(n_ranks=N_RANKS)
    both = (Ranks(shared, LENDERS), Ranks(shared, BORROWERS))
    lender, borrower = both
    for step, side, rank in steps:
        if step == "wait":
            for ranks in both:
                ranks.now_s += MEET_S / 2
        elif step == "end":
            both[side].partners[rank].has_ended = True
        elif step != "meet" or not is_mute[side][rank]:
            getattr(both[side], step)(rank)
        assert not lender.begun[0] or borrower.state() in (BEGUN, ENDED)
    for ranks in both:
        for rank in range(N_RANKS):
            if not is_mute[ranks.side][rank]:
                ranks.meet(rank)
    for _ in range(4):
        for ranks in both:
            ranks.now_s += MEET_S
            for rank in range(N_RANKS):
                ranks.hear(rank)
                ranks.look(rank)
    for ranks in both:
        assert len(set(ranks.begun)) == 1
        if not ranks.begun[0]:
            assert ranks.meetings == [None] * N_RANKS
    if borrower.begun[0] and lender.state() != UNMET:
        meeting = borrower.meetings[0]
        assert meeting is not None and (lender.begun[0] or meeting.any_ended)
    shared.close()
