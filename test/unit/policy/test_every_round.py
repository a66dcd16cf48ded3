"""Claims that hold for every round and every set of policies."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.decide import RoundPolicy
from sglang_live.policy.view import U0, U1, U2

from .views import (
    BUDGETED,
    NOW_S,
    SETS,
    few_examples,
    paused,
    permuted,
    playing,
    policy_of,
    same,
    view_of,
    views,
    waiting,
)

any_set = pytest.mark.parametrize("policies", SETS.values(), ids=SETS)
any_budgeted = pytest.mark.parametrize("policies", BUDGETED.values(), ids=BUDGETED)


@any_set
@few_examples
@given(view=views())
def test_equal_views_give_equal_rounds(policies, view):
    assert same(policies.decide(view), policies.decide(copy.deepcopy(view)))


@any_set
@few_examples
@given(view=views(), seed=st.integers(0, 1000))
def test_the_index_of_a_stream_does_not_matter(policies, view, seed):
    distinct = permuted(view, _without_ties(view))
    order = np.random.default_rng(seed).permutation(len(distinct))
    decided, again = policies.decide(distinct), policies.decide(permuted(distinct, order))
    assert np.array_equal(again.pause, decided.pause[order])
    assert np.array_equal(again.urgency, decided.urgency[order])
    assert np.array_equal(order[again.admit], decided.admit)
    assert again.prefill_budget == decided.prefill_budget
    assert again.next_change_s == decided.next_change_s


def _without_ties(view) -> np.ndarray:
    """Indices of streams that no key of any order confuses."""
    seen: set[float] = set()
    kept = []
    for i in range(len(view)):
        keys = {view.arrived_s[i], view.buffered_s[i]}
        if not (view.waiting[i] and keys & seen):
            kept.append(i)
            seen |= keys if view.waiting[i] else set()
    return np.array(kept, np.int64)


@any_set
@few_examples
@given(view=views())
def test_only_waiting_streams_are_admitted_and_each_once(policies, view):
    admitted = policies.decide(view).admit
    assert view.waiting[admitted].all()
    assert len(set(admitted.tolist())) == len(admitted)


@any_budgeted
@few_examples
@given(view=views())
def test_budgets_of_tokens_and_rows_are_never_exceeded(policies, view):
    admitted = policies.decide(view).admit
    assert view.prefill_tokens[admitted].sum() <= view.free_tokens
    assert len(admitted) <= view.free_rows


@any_set
@few_examples
@given(view=views())
def test_only_streams_with_time_and_telemetry_are_paused(policies, view):
    decided = policies.decide(view)
    out = decided.pause
    assert (decided.urgency[out] == U2).all()
    assert view.managed[out].all()
    assert not view.waiting[out].any()
    assert not np.isnan(view.buffered_s[out]).any()
    assert (view.buffered_s[out] > policies.safe_s).all()


@any_set
@few_examples
@given(view=views())
def test_no_stream_is_paused_beyond_the_bound(policies, view):
    out = policies.decide(view).pause
    held_for_s = NOW_S - view.since_s[out & view.paused]
    assert (held_for_s < policies.config.pacing.max_pause_s).all()


@any_set
@few_examples
@given(view=views())
def test_the_next_change_is_known_while_a_stream_is_paused(policies, view):
    decided = policies.decide(view)
    assert decided.next_change_s >= NOW_S
    if decided.pause.any():
        assert decided.next_change_s <= NOW_S + policies.config.pacing.max_pause_s


@any_set
@few_examples
@given(view=views())
def test_a_running_prefill_is_never_refused(policies, view):
    budget = policies.decide(view).prefill_budget
    assert budget is None or budget >= 0
    if view.prefill_running:
        assert budget is None or budget >= policies.config.stage.min_chunk_tokens


@any_set
def test_an_empty_stage_has_nothing_to_decide(policies):
    decided = policies.decide(view_of())
    assert len(decided.admit) == len(decided.pause) == 0
    assert decided.prefill_budget is None


@any_set
def test_streams_of_one_class_are_admitted_by_arrival(policies):
    view = view_of(waiting(age_s=1.0), waiting(age_s=3.0), waiting(age_s=2.0))
    assert policies.decide(view).admit.tolist() == [1, 2, 0]


@any_set
def test_streams_without_telemetry_are_served_by_arrival_and_counted(policies):
    lost = {"buffered_s": np.nan}
    view = view_of(
        waiting(age_s=1.0, started=True, **lost),
        waiting(age_s=3.0, **lost),
        waiting(age_s=2.0, started=True, **lost),
        playing(np.nan),
        paused(np.nan, for_s=1.0),
    )
    decided = policies.decide(view)
    assert decided.admit.tolist() == [1, 2, 0]
    assert not decided.pause.any()
    assert decided.urgency.tolist() == [-1, U1, -1, -1, -1]
    assert decided.n_unknown == 4


@any_set
def test_streams_without_a_listener_are_never_paused(policies):
    view = view_of(playing(9.0, managed=False), waiting(), playing(0.1))
    decided = policies.decide(view)
    assert not decided.pause[0]
    assert decided.urgency.tolist() == [U2, U1, U0]


def test_orders_and_pacing_decide_rounds_and_the_other_policies_do_not():
    assert policy_of(("urgency", "pacing", "truncate")) == RoundPolicy(order="urgency", pacing=True)
    assert policy_of(("pacing",)) == RoundPolicy(order="fcfs", pacing=True)
    assert policy_of(()) == RoundPolicy(order="fcfs", pacing=False)
