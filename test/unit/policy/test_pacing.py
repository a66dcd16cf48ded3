"""Marks, and which streams are paused between them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.errors import BadInputError
from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.pacing import Marks, pacing_marks
from sglang_live.policy.view import StageRates, StageView

from .views import NOW_S, few_examples, paused, playing, policy_of, starting, view_of, waiting

POLICIES = policy_of(("pacing",))
CONFIG = POLICIES.config
SAFE_S = CONFIG.urgency.p_safe_s


def marks_of(view: StageView, safe_s: float, config: PolicyConfig, **other) -> Marks:
    return pacing_marks(view, safe_s, config.stage, config.pacing, config.urgency, **other)


def marks(round_s: float = 0.015):
    view = view_of(playing(1.0), rates=StageRates(round_s=round_s))
    return marks_of(view, SAFE_S, CONFIG)


def test_fast_rounds_need_little_buffer():
    found = marks(round_s=0.015)
    assert 0.4 < found.low_s < 0.7
    assert 0.7 < found.high_s < 1.0


@pytest.mark.parametrize("round_s", [0.08, 0.1, 0.5])
def test_rounds_that_only_just_keep_up_are_not_paced(round_s):
    view = view_of(playing(25.0), paused(25.0), rates=StageRates(round_s=round_s))
    assert not POLICIES.decide(view).pause.any()


@given(late_s=st.floats(0, 2), more_s=st.floats(0, 2))
def test_a_stage_that_is_later_keeps_more_buffer(late_s, more_s):
    """By how much it is later, and no more: the distance between the marks stays."""
    on_time, late = (
        marks_of(replace(view_of(playing(1.0)), late_s=one_s), SAFE_S, CONFIG)
        for one_s in (late_s, late_s + more_s)
    )
    assert on_time.low_s <= late.low_s
    assert late.high_s - late.low_s == pytest.approx(on_time.high_s - on_time.low_s)
    if on_time.low_s > SAFE_S:
        assert late.low_s - on_time.low_s >= more_s - 1e-9


@given(round_s=st.floats(0.001, 0.5), more_s=st.floats(0, 0.5))
def test_slower_rounds_never_lower_a_mark(round_s, more_s):
    fast, slow = marks(round_s), marks(round_s + more_s)
    assert fast.low_s <= slow.low_s
    assert fast.high_s <= slow.high_s


@given(round_s=st.floats(0.001, 0.5))
def test_the_low_mark_covers_the_time_to_the_next_sound(round_s):
    whole_chunk_s = CONFIG.stage.chunk_steps * round_s + CONFIG.stage.pipeline_s
    view = view_of(playing(1.0), rates=StageRates(round_s=round_s))
    assert min(marks_of(view, SAFE_S, CONFIG).low_s, CONFIG.pacing.max_low_s) >= min(
        whole_chunk_s, CONFIG.pacing.max_low_s
    )


def test_a_stream_pauses_above_the_high_mark_and_resumes_at_the_low_one():
    low_s, high_s = marks().low_s, marks().high_s
    between_s = (low_s + high_s) / 2
    assert POLICIES.decide(view_of(playing(high_s + 0.01))).pause.all()
    assert POLICIES.decide(view_of(paused(between_s))).pause.all()
    view = view_of(playing(between_s), paused(low_s), playing(low_s))
    assert not POLICIES.decide(view).pause.any()


def test_a_stream_whose_consumer_has_not_begun_is_not_paced():
    assert not POLICIES.decide(
        view_of(starting(buffered_s=9.0), waiting(buffered_s=9.0))
    ).pause.any()


def test_a_paused_stream_runs_for_a_round_after_the_bound():
    assert POLICIES.decide(view_of(paused(9.0, for_s=9.9))).pause[0]
    assert not POLICIES.decide(view_of(paused(9.0, for_s=10.1))).pause[0]


@few_examples
@given(buffered_s=st.lists(st.floats(0.7, 12), min_size=1, max_size=8), for_s=st.floats(0, 9.9))
def test_the_first_stream_resumes_at_the_next_change_and_none_before_it(buffered_s, for_s):
    next_change_s = POLICIES.decide(
        view_of(*[paused(a, for_s=for_s) for a in buffered_s])
    ).next_change_s

    def pausing(passed_s: float) -> np.ndarray:
        later = [paused(a - passed_s, for_s=for_s + passed_s) for a in buffered_s]
        return POLICIES.decide(view_of(*later)).pause

    assert pausing(max(next_change_s - NOW_S - 1e-6, 0.0)).all()
    assert not pausing(next_change_s - NOW_S + 1e-6).all()


def test_the_next_change_is_no_later_than_the_bound():
    round_ = POLICIES.decide(view_of(paused(500.0, for_s=9.0)))
    assert round_.next_change_s == pytest.approx(NOW_S + 1.0)


# --- boundaries ---

# All of them are sums of powers of two, so that sums are exact.
EXACT = PolicyConfig().changed(
    {
        "stage.step_s": 0.0625,
        "stage.pipeline_s": 0.25,
        "urgency.p_safe_s": 0.5,
        "pacing.gap_s": 0.5,
    }
)
EXACT_RATES = StageRates(round_s=2**-7)
EXACT_POLICY = policy_of(("pacing",), EXACT)


def exact_marks(*streams, **other):
    return marks_of(view_of(*streams, rates=EXACT_RATES), 0.5, EXACT, **other)


def test_marks_belong_to_the_stream_until_they_are_passed():
    found = exact_marks(playing(1.0))
    low_s, high_s = found.low_s, found.high_s
    assert high_s == low_s + 0.5
    for streams, paused_are in (
        ([playing(high_s)], [False]),
        ([playing(high_s + 2**-10)], [True]),
        ([playing(high_s), paused(8.0)], [False, True]),
        ([paused(low_s + 2**-10)], [True]),
        ([paused(low_s)], [False]),
    ):
        decided = EXACT_POLICY.decide(view_of(*streams, rates=EXACT_RATES))
        assert decided.pause.tolist() == paused_are


def test_the_bound_of_a_pause_is_part_of_it():
    decided = EXACT_POLICY.decide(view_of(paused(9.0, for_s=10.0), rates=EXACT_RATES))
    assert not decided.pause.any()


def test_under_memory_pressure_marks_are_where_utility_is_zero():
    config = EXACT.changed({"urgency.beta": 2**-9})
    view = view_of(playing(1.0, kv_tokens=8192), playing(1.0, kv_tokens=1), occupancy=0.5)
    found = marks_of(view, 0.5, config, crowded=True)
    worth_s = 0.5 * (1.0 + 2**-9 * 0.5 * 8192)
    assert found.high_s[0] == worth_s
    assert found.low_s[0] == worth_s - 0.5
    plain = marks_of(view, 0.5, config)
    assert (found.low_s[1], found.high_s[1]) == (plain.low_s, plain.high_s)


def test_streams_that_hold_much_kv_run_ahead_before_a_stream_waits_for_memory():
    config = EXACT.changed({"pacing.runs_ahead_for_kv": True, "urgency.beta": 2**-8})
    view = view_of(playing(1.0, kv_tokens=8192), playing(1.0, kv_tokens=1), occupancy=0.5)
    found, plain = marks_of(view, 0.5, config), marks_of(view, 0.5, EXACT)
    assert found.high_s[0] == 0.5 * (1.0 + 2**-8 * 0.5 * 8192)
    assert found.high_s[1] == plain.high_s
    # A stream that has paused resumes as early as any other: none waits for its KV.
    assert found.low_s == plain.low_s


def test_no_mark_is_below_what_is_safe():
    view = view_of(playing(1.0), rates=EXACT_RATES)
    assert marks_of(view, 3.0, EXACT).low_s == 3.0


@pytest.mark.parametrize(
    "edge",
    [
        {"stage.pipeline_s": 0.0, "urgency.beta": 0.0},
        {"pacing.gap_s": 10.0},
        {"urgency.p_safe_s": 30.0},
        {"stage.min_chunk_tokens": 2048},
        {"deadline.n_startup_max": 1, "stage.chunk_steps": 1},
    ],
    ids=str,
)
def test_constants_at_their_bounds_are_accepted(edge):
    assert PolicyConfig().changed(edge)


ZERO = ("stage.step_s", "urgency.p_safe_s", "admission.max_bypass_s", "stage.chunk_steps")


@pytest.mark.parametrize(
    "wrong",
    [{name: 0} for name in (*ZERO, "deadline.n_startup_max")]
    + [
        {"slicing.min_slice_s": 0},
        {"slicing.overhead": 0},
        {"deadline.n_startup_max": 1.5},
        {"stage.chunk_tokens": 100.0},
        {"stage.may_pause_prefill": 1},
        {"pacing.runs_ahead_for_kv": 1.0},
    ]
    + [
        {"urgency.p_safe_s": 0.0},
        {"urgency.p_safe_s": -1.0},
        {"urgency.beta": float("nan")},
        {"stage.chunk_steps": 2.5},
        {"stage.min_chunk_tokens": 4096},
        {"pacing.max_pause_s": float("inf")},
    ]
    + [{"stage.pipeline_s": -0.1}, {"urgency.p_safe_s": 30.1}, {"slicing.min_slice_s": 0.2}]
    + [{"best_effort.patience_s": 10.1}, {"pacing.gap_s": 0.0}]
    + [{"no_part.gap_s": 1.0}, {"pacing.no_constant": 1.0}, {"stage.step_s.more": 1.0}],
    ids=str,
)
def test_constants_beyond_their_bounds_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(BadInputError, match=name.rpartition(".")[2]):
        PolicyConfig().changed(wrong)
