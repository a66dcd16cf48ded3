"""Claims about predictions of rounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.round_cost import RoundCost

some_costs = st.tuples(*[st.floats(1e-6, 0.1)] * 2, *[st.floats(0, 1e-4)] * 2, st.floats(0, 0.1))


@given(
    costs=some_costs,
    limit_s=st.floats(1e-3, 10),
    context=st.integers(0, 10_000),
    audio_s=st.floats(0, 30),
)
def test_the_tokens_within_a_limit_take_that_long_and_no_longer(costs, limit_s, context, audio_s):
    cost = RoundCost(prefill=(*costs, 0.0))
    tokens = cost.tokens_within(limit_s, context, audio_s)
    if tokens == 0.0:
        assert cost.prefill_s(1.0, context, audio_s) >= limit_s
    else:
        assert cost.prefill_s(tokens, context, audio_s) == pytest.approx(limit_s, rel=1e-6)


def test_tokens_that_cost_nothing_are_not_limited():
    cost = RoundCost(prefill=(0.01, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert cost.tokens_within(0.02, 100) == math.inf
    assert cost.tokens_within(0.01, 100) == 0.0


def test_kv_from_the_host_takes_time():
    cost = RoundCost(prefill=(0.0, 0.0, 0.0, 0.0, 0.0, 1e-3))
    assert cost.prefill_s(10.0, 0.0, loaded=100) == pytest.approx(0.1)
