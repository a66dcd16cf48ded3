"""Which streams are urgent, and the order of waiting streams."""

import numpy as np
import pytest
from hypothesis import given

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.urgency import utility
from sglang_live.policy.view import U0, U1, U2

from .views import (
    few_examples,
    free_index,
    playing,
    policy_of,
    starting,
    view_of,
    views,
    waiting,
)

POLICIES = policy_of(("urgency",))
CONFIG = POLICIES.config
P_SAFE_S = CONFIG.urgency.p_safe_s


def test_a_low_buffer_is_urgent_a_missing_first_sound_next():
    view = view_of(playing(P_SAFE_S), playing(P_SAFE_S + 0.01), starting(), waiting())
    assert POLICIES.decide(view).urgency.tolist() == [U0, U2, U1, U1]


def test_utility_is_kv_that_is_freed_minus_speech_that_may_be_wasted():
    config = PolicyConfig().changed({"urgency.beta": 0.001, "urgency.p_safe_s": 0.5})
    view = view_of(playing(2.0, kv_tokens=1000), playing(0.1, kv_tokens=400), occupancy=0.5)
    found = utility(view, np.array([0, 1]), config.urgency)
    assert found.tolist() == [0.001 * 1000 * 0.5 - 3.0, 0.001 * 400 * 0.5]


def test_waiting_streams_are_ordered_as_in_algorithm_1():
    view = view_of(
        waiting(started=True, buffered_s=3.0),  # U2, much to waste
        waiting(age_s=1.0),
        waiting(started=True, buffered_s=0.4),
        waiting(started=True, buffered_s=1.0),  # U2, little to waste
        waiting(age_s=2.0),
        waiting(started=True, buffered_s=0.1),
    )
    assert POLICIES.decide(view).admit.tolist() == [5, 2, 4, 1, 3, 0]


@few_examples
@given(view=views())
def test_classes_are_never_mixed_in_the_order(view):
    decided = POLICIES.decide(view)
    waited_s = view.now_s - view.since_s
    ranks = [
        U1
        if decided.urgency[i] == U2 and waited_s[i] > CONFIG.admission.max_wait_s
        # Unknown streams stand among U1.
        else abs(int(decided.urgency[i]))
        for i in decided.admit
    ]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("order", ["urgency", "deadline"])
def test_no_stream_pauses_for_an_urgent_one(order):
    view = view_of(playing(5.0), playing(0.7), playing(0.1), starting())
    assert not policy_of((order,)).decide(view).pause.any()


# --- engines that share a device ---


def test_an_engine_is_urgent_to_others_while_an_urgent_stream_can_step():
    for streams, urgent in (
        ((playing(0.1),), True),
        ((starting(),), True),
        ((playing(2.0), waiting()), True),
        ((playing(2.0), waiting(managed=False)), False),
        ((playing(0.1, blocked=True),), False),
        ((playing(np.nan), free_index()), False),
    ):
        assert POLICIES.decide(view_of(*streams)).urgent == urgent
    assert not POLICIES.decide(view_of(playing(2.0), waiting(100), free_tokens=10)).urgent
    assert policy_of(("pacing",)).decide(view_of(starting())).urgent


# --- streams without a listener ---


def test_a_stream_without_a_listener_waits_behind_first_sounds_for_a_limited_time():
    """In the paper all but the third and the last have the same class: they have not begun."""
    reads = waiting(managed=False, age_s=1.0, for_s=1.0)
    long = waiting(managed=False, age_s=11.0, for_s=CONFIG.admission.max_wait_s + 0.1)
    has_time = waiting(buffered_s=5.0, started=True, kv_tokens=100)
    view = view_of(reads, waiting(age_s=0.5), long, waiting(age_s=0.1), has_time)
    assert POLICIES.decide(view).admit.tolist() == [2, 1, 3, 0, 4]


# --- background work ---

SPEAKING = waiting(managed=False, background=True, started=True)


@pytest.mark.parametrize("policies", [POLICIES, policy_of(("deadline",))], ids=lambda p: p.order)
@pytest.mark.parametrize(
    "other", [waiting(), waiting(managed=False, started=True), starting(), playing(P_SAFE_S / 2)]
)
def test_background_work_waits_while_a_stream_is_in_need(policies, other):
    assert 0 not in policies.decide(view_of(SPEAKING, other)).admit
    assert 0 in policies.decide(view_of(SPEAKING, playing(3.0), free_index())).admit


def test_background_work_waits_for_a_limited_time_and_displaces_no_stream():
    patient = waiting(
        managed=False, background=True, started=True, for_s=CONFIG.admission.max_wait_s + 1
    )
    assert 0 in POLICIES.decide(view_of(patient, waiting())).admit
    crowded = view_of(SPEAKING, waiting(tokens=100), free_tokens=150)
    assert POLICIES.decide(crowded).admit.tolist() == [1]


# --- boundaries ---


def test_a_stream_that_waited_up_to_the_bound_has_not_waited_for_long():
    has_time = {"started": True, "buffered_s": 5.0, "age_s": 9.0}
    at_the_bound = waiting(for_s=CONFIG.admission.max_wait_s, **has_time)
    assert POLICIES.decide(view_of(at_the_bound, waiting())).admit.tolist() == [1, 0]
    beyond = waiting(for_s=CONFIG.admission.max_wait_s + 0.1, **has_time)
    assert POLICIES.decide(view_of(beyond, waiting())).admit.tolist() == [0, 1]


def test_two_and_three_waiting_streams_are_ordered():
    assert POLICIES.decide(view_of(waiting(age_s=1.0), waiting(age_s=2.0))).admit.tolist() == [1, 0]
