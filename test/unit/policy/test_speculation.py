"""A speculative turn begins where nothing else needs its time, and wastes a bounded share."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.errors import BadInputError
from sglang_live.policy.config import TALKER
from sglang_live.policy.speculation import (
    SpeculationConfig,
    SpeculationView,
    after_turn,
    refusal,
)
from sglang_live.policy.view import FRAME_S

CONFIG = SpeculationConfig()
IDLE = SpeculationView(n_more=4, n_sessions=2, n_urgent=0, session_left=1, server_left=1)


def refused(**changes) -> str:
    return refusal(replace(IDLE, **changes), CONFIG)


def test_it_begins_on_a_server_that_has_room():
    assert refused() == ""


def test_it_begins_only_where_one_more_session_would_be_admitted():
    assert refused(n_more=0) == "no_room"


def test_on_a_small_server_one_urgent_turn_is_too_many():
    assert refused(n_urgent=1) == "busy"


def test_a_listener_to_whom_pacing_leaves_least_is_not_urgent():
    unfinished_s = (TALKER.stage.chunk_steps - 1) * FRAME_S
    assert CONFIG.safe_s < TALKER.urgency.p_safe_s - unfinished_s


def test_a_large_server_always_has_some_urgent_turns():
    assert refused(n_sessions=100, n_urgent=40) == ""
    assert refused(n_sessions=100, n_urgent=41) == "busy"


@pytest.mark.parametrize("whose", ["session", "server"])
def test_it_begins_only_while_steps_may_be_wasted(whose):
    assert refused(**{f"{whose}_left": 0}) == f"{whose}_waste"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300))), st.floats(0, 1), st.floats(1, 500))
def test_withdrawn_steps_are_a_bounded_share_of_the_useful_ones(turns, share, burst):
    left, useful, withdrawn = burst, 0, 0
    for wants_to_waste, n_steps in turns:
        wastes = wants_to_waste and left > 0
        left = after_turn(left, n_steps, withdrawn=wastes, share=share, burst=burst)
        useful += 0 if wastes else n_steps
        withdrawn += n_steps if wastes else 0
        assert left <= burst
    assert withdrawn <= burst + share * useful + 300


def test_useful_turns_earn_back_what_was_wasted():
    left = after_turn(10.0, 30, withdrawn=True, share=0.5, burst=10)
    assert left == -20
    assert after_turn(left, 60, withdrawn=False, share=0.5, burst=10) == 10


@pytest.mark.parametrize("wrong", [{"urgent_share": 2}, {"waste_share": -1}, {"server_burst": 0}])
def test_impossible_constants_are_refused(wrong):
    with pytest.raises(BadInputError, match="must be"):
        SpeculationConfig(**wrong)
