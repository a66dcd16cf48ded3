"""Which streams are retracted first where memory is short, and for an urgent stream."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.pacing import resume_mark_s
from sglang_live.policy.urgency import classify, utility
from sglang_live.policy.view import U0, U2

from .views import (
    SETS,
    few_examples,
    free_index,
    paused,
    playing,
    policy_of,
    starting,
    view_of,
    views,
    waiting,
)

POLICY = policy_of(("urgency",))
CONFIG = POLICY.config
any_set = pytest.mark.parametrize("policies", SETS.values(), ids=SETS)


def order(view, policy=POLICY) -> list[int]:
    well_buffered, others = policy.retraction_order(view)
    return [*well_buffered.tolist(), *others.tolist()]


def test_the_order_is_that_of_algorithm_1_from_its_end():
    view = view_of(
        playing(0.1),  # U0, the least buffer
        starting(age_s=3.0),
        playing(6.0, kv_tokens=100),
        playing(0.4),  # U0
        waiting(),
        starting(age_s=1.0),
        playing(2.0, kv_tokens=100),
        free_index(),
    )
    assert order(view) == [2, 6, 5, 1, 3, 0]


def test_of_equal_buffers_the_stream_with_much_kv_is_kept():
    """Equation 3: its end frees most, and its KV would take longest to compute again."""
    view = view_of(playing(3.0, kv_tokens=4000), playing(3.0, kv_tokens=50), occupancy=1.0)
    assert order(view) == [1, 0]


def test_much_kv_outweighs_speech_only_in_a_full_pool():
    long, short = playing(3.0, kv_tokens=600), playing(2.5, kv_tokens=100)
    assert order(view_of(long, short, occupancy=0.1)) == [0, 1]
    assert order(view_of(long, short, occupancy=1.0)) == [1, 0]


def test_a_paused_stream_has_no_precedence_over_a_running_one():
    view = view_of(paused(3.0, kv_tokens=100), playing(5.0, kv_tokens=100))
    assert order(view) == [1, 0]


def test_a_stream_without_a_listener_wastes_no_speech():
    reads = playing(30.0, managed=False, kv_tokens=0 + 1)
    assert order(view_of(reads, playing(3.0, kv_tokens=100))) == [1, 0]


def test_a_stream_without_telemetry_is_retracted_among_those_that_have_not_sounded():
    lost = playing(np.nan, age_s=2.0)
    assert order(view_of(lost, starting(age_s=1.0), playing(0.1))) == [1, 0, 2]


def test_a_blocked_stream_is_retracted_before_those_that_can_run():
    blocked = replace(playing(0.1), blocked=True)
    view = view_of(starting(age_s=1.0), playing(0.4), blocked, playing(6.0, kv_tokens=100))
    assert order(view) == [3, 2, 0, 1]


@any_set
@few_examples
@given(view=views())
def test_no_stream_at_risk_is_retracted_before_one_that_has_time(policies, view):
    classes, _ = classify(view, policies.safe_s)
    well_buffered, others = policies.retraction_order(view)
    assert (classes[well_buffered] == U2).all()
    assert (classes[others] != U2).all()
    held = np.flatnonzero(~view.waiting & (view.kv_tokens > 0))
    assert sorted([*well_buffered, *others]) == held.tolist()
    ranks = [(not view.blocked[i], classes[i] == U0) for i in others]
    assert ranks == sorted(ranks)


@any_set
@few_examples
@given(view=views())
def test_only_streams_with_time_are_spare(policies, view):
    classes, _ = classify(view, policies.safe_s)
    spare = policies.spare(view)
    assert (classes[spare] == U2).all() and view.managed[spare].all()
    low_s = resume_mark_s(view, policies.safe_s, policies.config.stage, policies.config.pacing)
    running = spare[~view.paused[spare]]
    assert (view.buffered_s[running] > low_s).all()
    assert (utility(view, running, policies.config.urgency) < 0).all()


def test_a_running_stream_is_spare_while_its_speech_outweighs_its_kv():
    far, holds_much = playing(3.0, kv_tokens=100), playing(3.0, kv_tokens=4000)
    near, out = playing(0.55, kv_tokens=1), paused(0.7, kv_tokens=4000)
    view = view_of(holds_much, far, near, out, playing(0.1), starting(), occupancy=1.0)
    assert POLICY.spare(view).tolist() == [1, 3]


def test_kv_has_no_weight_without_beta():
    config = PolicyConfig().changed({"urgency.beta": 0.0})
    view = view_of(playing(3.0, kv_tokens=4000), playing(2.0, kv_tokens=50), occupancy=1.0)
    assert order(view, policy_of(("urgency",), config)) == [0, 1]
