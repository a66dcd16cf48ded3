from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.put_back import passing, slice_tokens
from sglang_live.policy.view import StageRates

CONFIG = PolicyConfig()


def test_shorter_prompts_pass_a_long_one():
    assert passing(10_000, [30, 9_000, 200], idle_s=0.0, free=50_000, config=CONFIG) == [0, 2]


def test_a_prompt_that_was_passed_for_long_goes_on():
    idle_s = CONFIG.max_put_back_s
    assert passing(10_000, [30], idle_s=idle_s, free=50_000, config=CONFIG) == []


def test_a_prompt_that_is_nearly_done_is_not_put_back_for_one_as_long():
    assert passing(50, [30], idle_s=0.0, free=50_000, config=CONFIG) == []


def test_slices_follow_the_measured_cost():
    assert slice_tokens(StageRates(prefill_s_per_token=1e-4), CONFIG) == 1000
    assert slice_tokens(StageRates(prefill_s_per_token=1.0), CONFIG) == CONFIG.min_chunk_tokens


@given(
    left=st.integers(1, 50_000),
    waiting=st.lists(st.integers(1, 50_000), max_size=20),
    idle_s=st.floats(0.0, 2.0),
    free=st.integers(-10, 60_000),
)
def test_who_passes_is_shorter_and_fits_beside_what_is_reserved(left, waiting, idle_s, free):
    found = passing(left, waiting, idle_s=idle_s, free=free, config=CONFIG)
    assert found == sorted(set(found))
    assert all(2 * waiting[i] <= left for i in found)
    assert sum(waiting[i] for i in found) <= max(free, 0)
    assert not found or idle_s < CONFIG.max_put_back_s


@given(comes=st.lists(st.integers(1, 200), min_size=1, max_size=400))
def test_a_long_prompt_is_computed_however_many_come(comes):
    """One round per arrival, of 50 ms: every max_put_back_s a slice is computed."""
    left, sliced_s, now_s, n_slices = 20_000, 0.0, 0.0, 0
    for tokens in comes:
        now_s += 0.05
        if not passing(left, [tokens], idle_s=now_s - sliced_s, free=10**6, config=CONFIG):
            left, sliced_s, n_slices = left - 64, now_s, n_slices + 1
        assert now_s - sliced_s <= CONFIG.max_put_back_s + 0.05
    assert n_slices >= int(now_s / (CONFIG.max_put_back_s + 0.05))
