"""Claims about the table that lender and borrower share."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.extensions.lending.table import N_ROWS, LeaseTable


@pytest.fixture
def pair():
    lender = LeaseTable()
    borrower = LeaseTable(os.dup(lender.fd))
    yield lender, borrower
    lender.close()


def test_a_lease_is_offered_accepted_recalled_left_and_released(pair):
    lender, borrower = pair
    row = lender.offer(100, 64)
    (lease,) = borrower.leases()
    assert (lease.row, lease.first, lease.n_slots, lease.recalled_ns) == (row, 100, 64, 0)
    assert not lender.is_active(row)
    borrower.accept(lease)
    borrower.set_used(lease, 7)
    assert lender.is_active(row) and lender.used(row) == 7 and not lender.has_left(row)
    lender.recall(row, 123)
    (recalled,) = borrower.leases()
    assert recalled.recalled_ns == 123
    borrower.leave(recalled)
    assert lender.has_left(row) and borrower.leases() == []
    lender.release(row)
    assert borrower.leases() == [] and not lender.has_left(row)


def test_an_answer_to_an_earlier_lease_of_the_row_says_nothing_of_this_one(pair):
    lender, borrower = pair
    row = lender.offer(0, 8)
    (lease,) = borrower.leases()
    borrower.leave(lease)
    lender.release(row)
    assert lender.offer(8, 8) == row
    assert not lender.has_left(row) and not lender.is_active(row)
    assert [one.first for one in borrower.leases()] == [8]


def test_a_recall_while_the_borrower_accepts_is_not_lost(pair):
    lender, borrower = pair
    row = lender.offer(0, 8)
    (seen,) = borrower.leases()
    lender.recall(row, 5)
    borrower.accept(seen)  # it has not seen the recall yet
    (lease,) = borrower.leases()
    assert lease.recalled_ns == 5
    borrower.leave(lease)
    assert lender.has_left(row)


def test_a_table_has_a_bounded_number_of_leases(pair):
    lender, _ = pair
    assert [lender.offer(n, 1) for n in range(N_ROWS)] == list(range(N_ROWS))
    assert lender.offer(0, 1) is None


@given(steps=st.lists(st.tuples(st.sampled_from("oarlf"), st.integers(0, 5)), max_size=80))
def test_both_sides_agree_in_any_order_of_their_steps(steps):
    lender = LeaseTable()
    borrower = LeaseTable(os.dup(lender.fd))
    state: dict[int, str] = {}
    n_offers = 0
    for step, n in steps:
        rows = sorted(state)
        leases = borrower.leases()
        assert sorted(lease.row for lease in leases) == [r for r in rows if state[r] != "left"]
        for lease in leases:
            assert (lease.recalled_ns > 0) == (state[lease.row] in ("recalled", "late"))
        if step == "o":
            row = lender.offer(n_offers, 1)
            n_offers += 1
            assert row is not None and row not in state
            state[row] = "offered"
        elif step == "a" and leases:
            lease = leases[n % len(leases)]
            borrower.accept(lease)
            state[lease.row] = "late" if lease.recalled_ns else "active"
        elif step == "r" and rows and state[row := rows[n % len(rows)]] in ("offered", "active"):
            lender.recall(row, 1 + n)
            state[row] = "recalled"
        elif step == "l" and leases:
            lease = leases[n % len(leases)]
            if lease.recalled_ns:
                borrower.leave(lease)
                state[lease.row] = "left"
        elif step == "f":
            for row in rows:
                assert lender.has_left(row) == (state[row] == "left")
                if state[row] == "left":
                    lender.release(row)
                    del state[row]
    lender.close()
