"""Marks, and which streams are paused between them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.pacing import pacing_marks, yield_marks
from sglang_live.policy.view import StageRates

from .views import NOW_S, few_examples, paused, playing, policy_of, starting, view_of, waiting

POLICIES = policy_of(("pacing",))
CONFIG = POLICIES.config
SAFE_S = CONFIG.p_safe_s


def marks(round_s: float = 0.015, interrupts: float = 0.4, n_streams: int = 1):
    view = view_of(
        *[playing(1.0, interrupts=interrupts)] * n_streams,
        rates=StageRates(round_s=round_s),
    )
    return pacing_marks(view, SAFE_S, CONFIG)


def test_fast_rounds_need_little_buffer():
    found = marks(round_s=0.015, interrupts=0.5)
    assert 0.4 < found.low_s < 0.7
    assert 0.9 < found.high_s[0] < 1.3


@pytest.mark.parametrize("round_s", [0.08, 0.1, 0.5])
def test_rounds_that_only_just_keep_up_are_not_paced(round_s):
    view = view_of(playing(25.0), paused(25.0), rates=StageRates(round_s=round_s))
    assert not POLICIES.decide(view).pause.any()


@given(round_s=st.floats(0.001, 0.5), more_s=st.floats(0, 0.5))
def test_slower_rounds_never_lower_a_mark(round_s, more_s):
    fast, slow = marks(round_s), marks(round_s + more_s)
    assert fast.low_s <= slow.low_s
    assert (fast.high_s <= slow.high_s).all()


@given(interrupts=st.floats(0, 1), more=st.floats(0, 1), round_s=st.floats(0.001, 0.5))
def test_a_user_who_interrupts_more_has_no_higher_mark(interrupts, more, round_s):
    less, most = marks(round_s, interrupts), marks(round_s, min(interrupts + more, 1.0))
    assert most.high_s[0] <= less.high_s[0]
    assert most.low_s == less.low_s  # interruptions raise no risk of silence


def test_marks_are_far_enough_apart_that_flips_stay_rare():
    one = marks(interrupts=1.0)
    assert one.high_s[0] - one.low_s == pytest.approx(CONFIG.min_gap_s)
    many = marks(n_streams=512)
    flips_per_s = 2 * 512 / (many.high_s[0] - many.low_s)
    assert flips_per_s * CONFIG.flip_s <= CONFIG.flip_share + 1e-9


@given(round_s=st.floats(0.001, 0.5))
def test_the_low_mark_covers_the_time_to_the_next_sound(round_s):
    whole_chunk_s = CONFIG.chunk_steps * round_s + CONFIG.pipeline_s
    view = view_of(playing(1.0), rates=StageRates(round_s=round_s))
    assert yield_marks(view, SAFE_S, CONFIG).low_s >= whole_chunk_s
    assert min(pacing_marks(view, SAFE_S, CONFIG).low_s, CONFIG.max_low_s) >= min(
        whole_chunk_s, CONFIG.max_low_s
    )


def test_a_stream_pauses_above_the_high_mark_and_resumes_at_the_low_one():
    low_s, high_s = marks().low_s, marks().high_s[0]
    between_s = (low_s + high_s) / 2
    assert POLICIES.decide(view_of(playing(high_s + 0.01))).pause.all()
    assert POLICIES.decide(view_of(paused(between_s))).pause.all()
    view = view_of(playing(between_s), paused(low_s), playing(low_s))
    assert not POLICIES.decide(view).pause.any()


def test_streams_with_room_for_a_chunk_resume_when_a_round_runs_anyway():
    low_s, high_s = marks().low_s, marks().high_s[0]
    chunk_s = CONFIG.chunk_steps * CONFIG.step_s
    streams = playing(low_s), paused(high_s - chunk_s - 0.01), paused(high_s - chunk_s + 0.01)
    assert POLICIES.decide(view_of(*streams)).pause.tolist() == [False, False, True]


def test_streams_stay_paused_where_each_costs_a_round_of_its_own():
    low_s = marks().low_s
    rates = StageRates(round_s=0.015, round_s_per_stream=0.9 * 0.015)
    view = view_of(playing(low_s + 0.1), paused(low_s + 0.01), rates=rates)
    assert POLICIES.decide(view).pause.tolist() == [False, True]


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


def test_without_an_interrupt_history_no_stream_is_paced():
    assert not POLICIES.decide(view_of(playing(9.0, interrupts=np.nan))).pause.any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"p_safe_s": 0.0},
        {"alpha": -1.0},
        {"min_gap_s": 20.0},
        {"chunk_steps": 2.5},
        {"max_pause_s": float("inf")},
        {"beta": float("nan")},
        {"min_chunk_tokens": 4096},
    ],
    ids=str,
)
def test_invalid_constants_are_refused(wrong):
    with pytest.raises(ValueError):
        PolicyConfig(**wrong)


def test_streams_of_a_user_who_does_not_interrupt_get_far_ahead_until_one_is_urgent():
    patient = playing(6.0, interrupts=0.02)
    urgency_too = policy_of(("urgency", "pacing"))
    assert not urgency_too.decide(view_of(patient)).pause.any()
    assert urgency_too.decide(view_of(patient, starting())).pause.tolist() == [True, False]


# --- boundaries ---

# All of them are sums of powers of two, so that sums are exact.
EXACT = PolicyConfig(
    step_s=0.0625,
    pipeline_s=0.25,
    jitter_s=0.0625,
    p_safe_s=0.5,
    min_gap_s=0.25,
    max_gap_s=8.0,
    flip_s=2**-12,
    flip_share=2**-4,
    company_share=0.25,
)
EXACT_RATES = StageRates(round_s=2**-7)
EXACT_POLICY = policy_of(("pacing",), EXACT)


def exact_marks(*streams, **other):
    return pacing_marks(view_of(*streams, rates=EXACT_RATES), 0.5, EXACT, **other)


def test_marks_belong_to_the_stream_until_they_are_passed():
    stream = playing(1.0, interrupts=0.5)
    found = exact_marks(stream)
    low_s, high_s = found.low_s, float(found.high_s[0])
    assert high_s == low_s + 0.5
    for streams, paused_are in (
        ([playing(high_s)], [False]),
        ([playing(high_s + 2**-10)], [True]),
        ([playing(high_s), paused(8.0)], [False, True]),
        ([paused(low_s + 2**-10)], [True]),
        ([paused(low_s)], [False]),
    ):
        streams = [replace(stream, interrupts=0.5) for stream in streams]
        decided = EXACT_POLICY.decide(view_of(*streams, rates=EXACT_RATES))
        assert decided.pause.tolist() == paused_are


def test_the_bound_of_a_pause_is_part_of_it():
    decided = EXACT_POLICY.decide(view_of(paused(9.0, for_s=10.0), rates=EXACT_RATES))
    assert not decided.pause.any()


def test_the_gap_between_the_marks_follows_the_number_of_responses():
    found = marks(n_streams=512)
    gap_s = 2 * 512 * CONFIG.flip_s / CONFIG.flip_share
    assert found.high_s[0] - found.low_s == pytest.approx(gap_s)
    others = [playing(1.0, managed=False)] * 600
    view = view_of(*[playing(1.0)] * 512, *others, rates=StageRates(round_s=0.015))
    found = pacing_marks(view, SAFE_S, CONFIG)
    assert found.high_s[0] - found.low_s == pytest.approx(gap_s)


def test_under_memory_pressure_marks_are_where_utility_is_zero():
    config = replace(EXACT, alpha=2.0, beta=2**-8)
    view = view_of(playing(1.0, kv_tokens=8192), playing(1.0, kv_tokens=1), occupancy=0.5)
    found = pacing_marks(view, 0.5, config, crowded=True)
    worth_s = 0.5 * (1.0 + 2**-9 * 0.5 * 8192)
    assert found.high_s[0] == worth_s
    assert found.low_s[0] == worth_s - 0.25
    plain = pacing_marks(view, 0.5, config)
    assert (found.low_s[1], found.high_s[1]) == (plain.low_s, plain.high_s[1])
    crowd = [playing(1.0, kv_tokens=16384)] * 512
    found = pacing_marks(view_of(*crowd, occupancy=0.5), 0.5, config, crowded=True)
    rare_s = 2 * 512 * config.flip_s / config.flip_share
    assert found.low_s[0] == 0.5 * (1.0 + 2**-9 * 0.5 * 16384) - rare_s


def test_streams_that_hold_much_kv_run_ahead_before_a_stream_waits_for_memory():
    config = replace(EXACT, runs_ahead_for_kv=True, beta=2**-8)
    view = view_of(playing(1.0, kv_tokens=8192), playing(1.0, kv_tokens=1), occupancy=0.5)
    found, plain = pacing_marks(view, 0.5, config), pacing_marks(view, 0.5, EXACT)
    assert found.high_s[0] == 0.5 * (1.0 + 2**-8 * 0.5 * 8192)
    assert found.high_s[1] == plain.high_s[1]
    # A stream that has paused resumes as early as any other: none waits for its KV.
    assert found.low_s == plain.low_s


def test_no_mark_is_below_what_is_safe():
    view = view_of(playing(1.0), rates=EXACT_RATES)
    assert pacing_marks(view, 3.0, EXACT).low_s == 3.0
    assert yield_marks(view, 3.0, EXACT).low_s == 3.0


def test_company_is_kept_up_to_its_share_and_only_by_streams_with_room_for_a_chunk():
    low_s, high_s = exact_marks(playing(1.0)).low_s, exact_marks(playing(1.0)).high_s[0]
    room_s = EXACT.chunk_steps * EXACT.step_s
    at_share = StageRates(round_s=2**-7, round_s_per_stream=0.25 * 2**-7)
    runs, joins, stays = playing(low_s), paused(high_s - room_s), paused(high_s - room_s + 2**-10)
    view = view_of(runs, joins, stays, rates=at_share)
    assert EXACT_POLICY.decide(view).pause.tolist() == [False, False, True]
    dearer = StageRates(round_s=2**-7, round_s_per_stream=0.25 * 2**-7 + 2**-20)
    view = view_of(runs, joins, stays, rates=dearer)
    assert EXACT_POLICY.decide(view).pause.tolist() == [False, True, True]


def test_a_request_without_a_listener_is_no_company():
    low_s = exact_marks(playing(1.0)).low_s
    view = view_of(playing(low_s, managed=False), paused(low_s + 2**-10), rates=EXACT_RATES)
    assert EXACT_POLICY.decide(view).pause.tolist() == [False, True]


def test_where_pacing_and_yielding_both_apply_the_shorter_pause_does():
    both = policy_of(("urgency", "pacing"))
    view = view_of(playing(0.1), paused(9.0, for_s=2.1), paused(9.0, for_s=1.9))
    assert both.decide(view).pause.tolist() == [False, False, True]


@pytest.mark.parametrize(
    "edge",
    [
        {"pipeline_s": 0.0, "beta": 0.0, "jitter_rounds": 0.0, "jitter_s": 0.0},
        {"flip_s": 0.0, "yield_rounds": 0.0},
        {"min_gap_s": 10.0},
        {"p_safe_s": 30.0},
        {"min_chunk_tokens": 2048},
        {"n_startup_max": 1, "chunk_steps": 1},
    ],
    ids=str,
)
def test_constants_at_their_bounds_are_accepted(edge):
    assert PolicyConfig(**edge)


@pytest.mark.parametrize(
    "wrong",
    [{name: 0} for name in ("step_s", "alpha", "max_bypass_s", "chunk_steps", "n_startup_max")]
    + [
        {"min_slice_s": 0},
        {"slice_overhead": 0},
        {"n_startup_max": 1.5},
        {"chunk_tokens": 100.0},
        {"may_pause_prefill": 1},
        {"runs_ahead_for_kv": 1.0},
    ]
    + [{"pipeline_s": -0.1}, {"p_safe_s": 30.1}, {"min_slice_s": 0.2}],
    ids=str,
)
def test_constants_beyond_their_bounds_are_refused(wrong):
    with pytest.raises(ValueError):
        PolicyConfig(**wrong)
