"""Claims about the slots of a borrower's leases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.extensions.lending.slots import PeerSlots


def slots_of(*ranges: range) -> np.ndarray:
    return np.concatenate([np.array(r, np.int64) for r in ranges])


@pytest.fixture
def slots() -> PeerSlots:
    made = PeerSlots()
    made.add("a", slots_of(range(100, 110)))
    made.add("b", slots_of(range(500, 520), range(0, 5)))
    return made


def test_the_oldest_lease_is_filled_first(slots):
    assert set(slots.take(10).tolist()) == set(range(100, 110))
    assert slots.n_used("b") == 0


def test_more_than_is_free_takes_nothing(slots):
    assert slots.take(36) is None
    assert slots.n_free == 35


def test_a_closed_lease_gives_no_slots_and_ends_when_all_are_free(slots):
    taken = slots.take(12)
    slots.close("a")
    assert slots.n_free == 23
    assert not set(slots.take(23).tolist()) & set(range(100, 110))
    with pytest.raises(ValueError, match="10 slots"):
        slots.remove("a")
    slots.free(taken)
    assert slots.n_free == 2
    slots.remove("a")
    assert "a" not in slots and "b" in slots


@pytest.mark.parametrize(
    ("wrong", "reason"), [([100], "twice"), ([7777], "no lease"), ([99], "no lease")]
)
def test_a_slot_that_is_not_taken_cannot_be_freed(slots, wrong, reason):
    with pytest.raises(ValueError, match=reason):
        slots.free(np.array(wrong))


def test_a_lease_begins_once(slots):
    with pytest.raises(ValueError, match="already"):
        slots.add("a", slots_of(range(3)))


STEP = st.tuples(st.sampled_from(("take", "free", "open", "close", "reset")), st.integers(0, 30))


@given(steps=st.lists(STEP, max_size=60))
def test_slots_are_of_one_owner_in_any_order_of_events(steps):
    slots, held, n_leases, closed = PeerSlots(), [], 0, set()
    size = {}
    for step, n in steps:
        if step == "take":
            free = slots.n_free
            taken = slots.take(n)
            assert (taken is None) == (n > free)
            if taken is not None:
                assert not {s for h in held for s in h.tolist()} & set(taken.tolist())
                held.append(taken)
        elif step == "free" and held:
            slots.free(held.pop(n % len(held)))
        elif step == "open":
            slots.add(n_leases, np.arange(1000 * n_leases, 1000 * n_leases + n))
            size[n_leases] = n
            n_leases += 1
        elif step == "close" and n in slots:
            slots.close(n)
            closed.add(n)
            used = sum(int((h // 1000 == n).sum()) for h in held)
            assert slots.n_used(n) == used
            assert slots.touches(n, np.concatenate([[-1], *held])) == (used > 0)
            if not used:
                slots.remove(n)
                del size[n]
        elif step == "reset":
            slots.free_all()
            held = []
        in_open = sum(int((~np.isin(h // 1000, list(closed))).sum()) for h in held)
        assert slots.n_free == sum(n for k, n in size.items() if k not in closed) - in_open
