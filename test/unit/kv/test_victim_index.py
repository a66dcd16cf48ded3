"""The order of eviction: known futures, overdue ones, and LRU for the rest."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.kv.lazy_heap import LazyHeap
from sglang_live.kv.victim_index import Candidate, Victim, VictimIndex

from .naive_index import NaiveIndex

PAGE = 4
NOW_S = 100.0
KEYS = st.integers(0, 7)
# Whole seconds and few of them: sums are exact, and ties are common.
TIMES = st.sampled_from([float(second) for second in range(16)])
MORE_TOKENS = st.integers(0, 30) | st.just(1000)
PUT = st.tuples(
    st.just("put"),
    KEYS,
    st.fixed_dictionaries(
        {
            "n_tokens": st.integers(0, 30),
            "last_use_s": TIMES,
            "next_use_s": TIMES | st.none(),
            "whole": st.booleans(),
        }
    ),
)
OTHERS = st.one_of(
    st.tuples(st.just("protect"), KEYS, TIMES | st.just(math.inf)),
    st.tuples(st.sampled_from(("unprotect", "remove")), KEYS),
    st.tuples(st.just("shrink"), KEYS, st.integers(0, 8)),
    st.tuples(st.just("victims"), MORE_TOKENS, TIMES | st.just(-math.inf)),
    st.tuples(st.just("protected_victims"), MORE_TOKENS),
    st.tuples(st.just("later_tokens"), MORE_TOKENS, TIMES),
    st.tuples(st.just("wait"), st.sampled_from((1.0, 2.0, 5.0))),
)
# Long, and half of it puts: an index is worth nothing while it is empty.
OPERATIONS = st.lists(st.tuples(PUT, OTHERS), min_size=8, max_size=25).map(
    lambda pairs: [operation for pair in pairs for operation in pair]
)


def index_of(**next_uses_s: float | None) -> VictimIndex:
    """Keys of two pages each; without a next use, all used last at 0 s."""
    index = VictimIndex(PAGE)
    for key, next_use_s in next_uses_s.items():
        index.put(key, n_tokens=2 * PAGE, last_use_s=0.0, next_use_s=next_use_s)
    return index


def order(index: VictimIndex, now_s: float = NOW_S) -> list:
    return [victim.key for victim in index.victims(10**6, now_s)]


def apply(index, operations) -> list:
    """Results of all operations, and both totals after each. Time goes forward."""
    answers, now_s, sizes = [], 0.0, {}
    for name, *rest in operations:
        if name == "wait":
            now_s += rest[0]
        elif name in ("victims", "protected_victims"):
            which = {"protected": True} if len(rest) == 1 else {"later_than_s": rest[1]}
            answers.append(index.victims(rest[0], now_s, **which))
            for victim in answers[-1]:
                sizes[victim.key] -= victim.n_tokens
        elif name == "later_tokens":
            answers.append(index.later_tokens(now_s, rest[1], rest[0]))
        elif name == "put":
            index.put(rest[0], **rest[1])
            sizes[rest[0]] = rest[1]["n_tokens"]
        elif name == "remove" or name == "unprotect":
            getattr(index, name)(rest[0])
            sizes = {k: n for k, n in sizes.items() if name == "unprotect" or k != rest[0]}
        elif sizes.get(rest[0]):
            value = min(rest[1], sizes[rest[0]]) if name == "shrink" else rest[1]
            sizes[rest[0]] = value if name == "shrink" else sizes[rest[0]]
            getattr(index, name)(rest[0], value)
        answers.append((index.evictable_tokens, index.protected_tokens))
    return [*answers, index.victims(10**6, now_s)]


@settings(max_examples=100)
@given(operations=OPERATIONS)
def test_it_agrees_with_sorting_everything_at_every_decision(operations):
    assert apply(VictimIndex(PAGE), operations) == apply(NaiveIndex(PAGE), operations)


@settings(max_examples=20)
@given(operations=OPERATIONS)
def test_two_ranks_pick_alike(operations):
    assert apply(VictimIndex(PAGE), operations) == apply(VictimIndex(PAGE), operations)


@settings(max_examples=50)
@given(uses=st.lists(st.tuples(KEYS, TIMES), max_size=40), later_s=TIMES)
def test_without_estimates_it_is_lru(uses, later_s):
    index, last_uses = VictimIndex(PAGE), {}
    for key, step_s in uses:
        now_s = max(last_uses.values(), default=0.0) + step_s
        index.put(key, n_tokens=1, last_use_s=now_s)
        last_uses.pop(key, None)
        last_uses[key] = now_s
    lru = list(last_uses)  # a dict keeps the order of its last insertions
    assert order(index, max(last_uses.values(), default=0.0) + later_s) == lru
    assert (index.picks_known, index.picks_lru) == (0, len(lru))


def test_the_farthest_use_goes_first():
    index = index_of(soon=NOW_S + 2, last=NOW_S + 9, between=NOW_S + 5)
    assert order(index) == ["last", "between", "soon"]


def test_long_overdue_is_unlikely_to_come_soon():
    index = index_of(due=NOW_S, overdue=NOW_S - 7, later=NOW_S + 5, just_late=NOW_S - 1)
    assert order(index) == ["overdue", "later", "just_late", "due"]


def test_a_key_ranks_low_near_its_use_and_high_long_after_it():
    index = index_of(user=10.0, other=30.0)
    assert index.peek(9.0).key == "other"
    assert index.peek(19.0).key == "other"
    assert index.peek(21.0).key == "user"


def test_unknown_ones_stand_among_the_known_by_their_age():
    index = index_of(far=NOW_S + 50, near=NOW_S + 2)
    index.put("old leaf", n_tokens=1, last_use_s=NOW_S - 60)
    index.put("leaf", n_tokens=1, last_use_s=NOW_S - 10)
    assert order(index) == ["old leaf", "far", "leaf", "near"]
    assert (index.picks_known, index.picks_lru) == (2, 2)


def test_equals_go_in_order_of_their_coming():
    index = index_of(a=NOW_S + 5, b=NOW_S - 5, c=NOW_S + 5)
    index.put("leaf", n_tokens=1, last_use_s=NOW_S - 5)
    index.put("a", n_tokens=1, last_use_s=0.0, next_use_s=NOW_S + 5)
    assert order(index) == ["b", "c", "leaf", "a"]


def test_a_key_is_evicted_from_its_tail_page_by_page():
    index = index_of(far=NOW_S + 9, near=NOW_S + 1)
    assert index.victims(1, NOW_S) == [Victim("far", PAGE)]
    assert index.victims(PAGE + 1, NOW_S) == [Victim("far", PAGE), Victim("near", PAGE)]
    assert "far" not in index
    assert index.peek(NOW_S) == Candidate("near", PAGE, 1.0)


@pytest.mark.parametrize(("asked", "taken"), [(0, 0), (1, 2), (2, 2), (3, 6), (6, 6), (7, 10)])
def test_what_stays_is_whole_pages(asked, taken):
    index = VictimIndex(PAGE)
    index.put("k", n_tokens=2 * PAGE + 2, last_use_s=0.0)
    assert sum(victim.n_tokens for victim in index.victims(asked, NOW_S)) == taken
    assert index.evictable_tokens == 2 * PAGE + 2 - taken


def test_a_leaf_goes_whole():
    index = VictimIndex(PAGE)
    index.put("leaf", n_tokens=5 * PAGE, last_use_s=0.0, whole=True)
    assert index.victims(1, NOW_S) == [Victim("leaf", 5 * PAGE)]
    assert len(index) == index.evictable_tokens == 0


def test_it_returns_less_when_there_is_no_more():
    assert index_of(only=NOW_S).victims(100, NOW_S) == [Victim("only", 2 * PAGE)]
    assert VictimIndex(PAGE).victims(100, NOW_S) == []
    assert VictimIndex(PAGE).peek(NOW_S) is None


def test_protected_keys_are_not_evicted():
    index = index_of(speaks=NOW_S + 9, other=NOW_S + 1)
    index.protect("speaks", math.inf)
    assert (index.evictable_tokens, index.protected_tokens) == (2 * PAGE, 2 * PAGE)
    assert order(index) == ["other"]
    index.unprotect("speaks")
    assert (index.evictable_tokens, index.protected_tokens) == (2 * PAGE, 0)
    assert order(index) == ["speaks"]


def test_protection_that_has_run_out_counts_until_the_next_decision():
    index = index_of(warm=NOW_S + 9)
    index.protect("warm", NOW_S + 1)
    assert index.peek(NOW_S + 0.9) is None
    assert index.protected_tokens == 2 * PAGE
    assert index.peek(NOW_S + 1).key == "warm"
    assert index.protected_tokens == 0


def test_the_latest_protection_counts():
    index = index_of(user=NOW_S + 9)
    index.protect("user", math.inf)
    index.protect("user", NOW_S + 1)
    assert order(index, NOW_S + 1) == ["user"]


def test_protection_outlasts_a_new_rank_but_not_removal():
    index = index_of(user=NOW_S + 9)
    index.protect("user", math.inf)
    index.put("user", n_tokens=PAGE, last_use_s=0.0, next_use_s=NOW_S + 50)
    assert index.protected_tokens == PAGE
    index.remove("user")
    index.put("user", n_tokens=PAGE, last_use_s=0.0)
    assert order(index) == ["user"]


def test_only_kv_that_is_used_later_is_taken():
    index = index_of(later=NOW_S + 9, sooner=NOW_S + 2)
    index.put("old leaf", n_tokens=PAGE, last_use_s=NOW_S - 20)
    assert index.later_tokens(NOW_S, NOW_S + 3, 10**6) == 3 * PAGE
    assert index.later_tokens(NOW_S, NOW_S, 10**6) == 5 * PAGE
    assert index.later_tokens(NOW_S, NOW_S + 3, 5) == 5
    taken = index.victims(10**6, NOW_S, later_than_s=NOW_S + 3)
    assert [victim.key for victim in taken] == ["old leaf", "later"]


def test_a_key_that_was_evicted_can_be_removed_again():
    index = index_of(gone=NOW_S)
    index.victims(10**6, NOW_S)
    index.remove("gone")
    index.unprotect("gone")


def test_invalid_arguments_are_refused():
    index = index_of(key=NOW_S)
    for n_tokens, next_use_s in ((-1, 0.0), (1, math.nan), (1, math.inf)):
        with pytest.raises(ValueError):
            index.put("key", n_tokens=n_tokens, last_use_s=0.0, next_use_s=next_use_s)
    for n_tokens in (-1, 2 * PAGE + 1):
        with pytest.raises(ValueError):
            index.shrink("key", n_tokens)
    with pytest.raises(ValueError):
        index.protect("key", math.nan)
    with pytest.raises(KeyError):
        index.protect("unknown", 1.0)
    with pytest.raises(ValueError):
        VictimIndex(0)
    assert index.evictable_tokens == 2 * PAGE


def test_stale_entries_do_not_pile_up():
    index = index_of(user=NOW_S, other=NOW_S)
    for i in range(5000):
        index.put("user", n_tokens=1, last_use_s=0.0, next_use_s=NOW_S + i % 7)
        index.protect("other", NOW_S + i)
    heaps = [index._protected]
    for order in (index._free, index._kept):
        heaps += [order.latest, order.earliest, order.unused]
    assert max(len(heap._entries) for heap in heaps) < 100


# --- boundaries ---


def test_a_key_that_is_not_in_the_index_has_no_tokens():
    index = index_of(key=NOW_S)
    assert (index.n_tokens("key"), index.n_tokens("other")) == (2 * PAGE, 0)
    assert len(index) == 1
    assert "key" in index and "other" not in index


def test_a_page_may_have_one_token():
    index = VictimIndex(1)
    index.put("k", n_tokens=3, last_use_s=0.0)
    assert index.victims(1, NOW_S) == [Victim("k", 1)]


def test_a_key_can_shrink_to_its_size_and_to_nothing():
    index = index_of(key=NOW_S)
    index.shrink("key", 2 * PAGE)
    assert index.n_tokens("key") == 2 * PAGE
    index.shrink("key", 1)
    assert (index.n_tokens("key"), index.evictable_tokens) == (1, 1)
    index.shrink("key", 0)
    assert "key" not in index


def test_use_at_the_time_itself_is_not_later():
    index = index_of(key=NOW_S + 3)
    assert index.later_tokens(NOW_S, NOW_S + 3, 100) == 0
    assert index.victims(1, NOW_S, later_than_s=NOW_S + 3) == []
    assert index.later_tokens(NOW_S, NOW_S + 2.5, 100) == 2 * PAGE


def test_a_protected_key_is_taken_if_asked_for_and_the_rest_stays_protected():
    index = index_of(soon=NOW_S + 1, late=NOW_S + 9, free=NOW_S + 99)
    index.protect("soon", math.inf)
    index.protect("late", math.inf)
    assert index.victims(PAGE, NOW_S, protected=True) == [Victim("late", PAGE)]
    assert (index.protected_tokens, index.n_tokens("late")) == (3 * PAGE, PAGE)
    assert index.victims(99, NOW_S, protected=True) == [
        Victim("late", PAGE),
        Victim("soon", 2 * PAGE),
    ]
    assert order(index) == ["free"]


def test_a_heap_keeps_at_most_twice_its_items_and_64_stale_entries():
    class Item:
        seq = 0

    heap: LazyHeap[Item] = LazyHeap()
    items = [Item() for _ in range(110)]
    for value, item in enumerate(items):
        item.seq = value
        heap.push(float(value), item)
    sizes = []
    for item in items[:100]:
        item.seq = -1
        heap.drop()
        sizes.append(len(heap._entries))
    # 110 entries are too many as soon as fewer than 23 of their items are left.
    assert sizes == [110] * 87 + [22] * 13
    assert heap.top() is items[100]
