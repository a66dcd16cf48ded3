"""Claims about ranks that meet another engine, and see its end, each at its own time."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.engine_channel.lease_table import BORROWERS, LENDERS, LeaseTable
from sglang_live.engine_channel.meeting import DROPPED, ENDED, MEET_S, MET, UNMET, Meeting

N_RANKS = 3


class FakePartner:
    """A process that ends when the test says so."""

    has_ended = False


class Ranks:
    """The ranks of one engine, rank 0 of which tells the others that the pair begins."""

    def __init__(self, n_ranks: int = N_RANKS, side: int = BORROWERS):
        self.side, self.now_s = side, 0.0
        shared = LeaseTable(n_ranks=n_ranks)
        self.tables = [LeaseTable(os.dup(shared.fd), n_ranks, rank) for rank in range(n_ranks)]
        shared.close()
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
            meeting.has_begun = True
            self.told = set(range(1, len(self.meetings)))

    def hear(self, rank: int) -> None:
        if rank in self.told:
            self.told.remove(rank)
            meeting = self.meetings[rank]
            assert meeting is not None, "a pair begins that a rank does not know"
            meeting.has_begun = True

    @property
    def begun(self) -> list[bool]:
        return [meeting is not None and meeting.has_begun for meeting in self.meetings]


@pytest.mark.parametrize("side", [LENDERS, BORROWERS])
def test_a_pair_begins_when_all_ranks_have_met(side):
    ranks = Ranks(side=side)
    for rank in (0, 2):
        ranks.meet(rank)
        ranks.look(0)
        assert not any(ranks.begun)
    ranks.meet(1)
    ranks.look(0)
    assert ranks.begun == [True, False, False] and ranks.told == {1, 2}


def test_a_single_rank_begins_at_once():
    ranks = Ranks(1)
    ranks.meet(0)
    ranks.look(0)
    assert ranks.begun == [True]


def test_a_rank_that_sees_the_end_first_tells_the_others():
    ranks = Ranks()
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


def test_ranks_drop_a_pair_that_one_of_them_never_met():
    ranks = Ranks()
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


def test_ranks_drop_a_pair_that_rank_0_never_met():
    ranks = Ranks()
    ranks.meet(1)
    ranks.now_s = MEET_S + 0.1
    ranks.look(1)
    assert ranks.dropped[1] and ranks.tables[0].states(BORROWERS) == [UNMET, ENDED, UNMET]
    ranks.meet(0)
    ranks.meet(2)
    ranks.look(0)
    ranks.look(2)
    assert ranks.dropped == [True, True, True]
    assert ranks.tables[0].states(BORROWERS) == [DROPPED, ENDED, MET]


STEPS = st.lists(
    st.tuples(st.sampled_from(["meet", "look", "hear", "end", "wait"]), st.integers(0, N_RANKS - 1))
)


@given(steps=STEPS, is_mute=st.lists(st.booleans(), min_size=N_RANKS, max_size=N_RANKS))
def test_all_ranks_begin_or_none_does_whatever_each_sees_when(steps, is_mute):
    """is_mute: the broker's message to these ranks is lost."""
    ranks = Ranks()
    for step, rank in steps:
        if step == "wait":
            ranks.now_s += MEET_S / 2
        elif step == "end":
            ranks.partners[rank].has_ended = True
        elif step != "meet" or not is_mute[rank]:
            getattr(ranks, step)(rank)
    for rank in range(N_RANKS):
        if not is_mute[rank]:
            ranks.meet(rank)
    for _ in range(3):
        ranks.now_s += MEET_S
        for rank in range(N_RANKS):
            ranks.hear(rank)
            ranks.look(rank)
    if ranks.begun[0]:
        assert all(ranks.begun)
    else:
        assert not any(ranks.begun)
        assert ranks.meetings == [None] * N_RANKS
