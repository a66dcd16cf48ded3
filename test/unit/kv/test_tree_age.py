"""The bound on unused tokens, against a tree whose leaves are known."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_live.kv.tree_age import TreeAge

STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50), st.floats(0.0, 3.0)), max_size=60)


def test_an_unused_tree_is_old():
    assert TreeAge().unused_since(100.0, 80) == 80


def test_what_was_used_since_is_not():
    age = TreeAge()
    age.used(30, 100.0)
    age.used(20, 110.0)
    assert age.unused_since(105.0, 50) == 30
    assert age.unused_since(95.0, 50) == 0
    assert age.unused_since(120.0, 50) == 50


@given(STEPS, st.floats(0.0, 100.0))
def test_the_bound_never_exceeds_the_unused_tokens(steps, at_s):
    """Leaves of any size, used again and again; each use counts, so fewer may be found."""
    age, leaves, now_s = TreeAge(), {}, 0.0
    for leaf, n_tokens, pause_s in steps:
        now_s += pause_s
        n_tokens = leaves[leaf][0] if leaf in leaves else n_tokens
        leaves[leaf] = (n_tokens, now_s)
        age.used(n_tokens, now_s)
    size = sum(n_tokens for n_tokens, _ in leaves.values())
    unused = sum(n_tokens for n_tokens, used_s in leaves.values() if used_s < at_s)
    assert age.unused_since(at_s, size) <= unused


@given(st.integers(5000, 9000))
def test_memory_is_bounded_and_the_bound_stays_valid(n):
    age = TreeAge()
    for second in range(n):
        age.used(1, float(second))
    assert len(age._times_s) <= 4096
    assert age.unused_since(n - 10.0, n) == n - 10
    assert age.unused_since(1.0, n) == 0


def test_uses_within_a_tenth_of_a_second_count_as_one():
    age = TreeAge()
    age.used(30, 100.0)
    age.used(20, 100.09)
    age.used(10, 100.11)
    assert age._times_s == [100.0, 100.11]
    assert age._totals == [50, 60]


def test_a_use_counts_as_one_of_the_whole_tenth_before():
    age = TreeAge()
    age.used(30, 100.0)
    assert age.unused_since(100.09, 30) == 0
    assert age.unused_since(100.11, 30) == 30


def test_half_of_the_entries_are_dropped_when_there_are_too_many():
    age = TreeAge()
    for second in range(4096):
        age.used(1, float(second))
    assert len(age._times_s) == len(age._totals) == 4096
    age.used(1, 4096.0)
    assert len(age._times_s) == len(age._totals) == 4097 - 2048
    assert age._times_s[0] == 2048.0
