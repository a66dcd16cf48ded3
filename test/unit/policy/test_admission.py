"""Budgets of KV tokens and rows: which streams pass others, and for how long."""

import numpy as np
from hypothesis import given

from sglang_live.policy.admission import fitting

from .views import NOW_S, few_examples, paused, playing, policy_of, view_of, views, waiting

POLICIES = policy_of(("urgency",))
MAX_BYPASS_S = POLICIES.config.admission.max_bypass_s


def admitted(*streams, **other) -> list[int]:
    return POLICIES.decide(view_of(*streams, **other)).admit.tolist()


def test_smaller_streams_pass_one_that_does_not_fit():
    queue = waiting(100, age_s=3.0), waiting(900, age_s=2.0), waiting(300, age_s=1.0)
    assert admitted(*queue, free_tokens=500) == [0, 2]


def test_a_stream_is_passed_no_longer_than_the_bound():
    too_long = MAX_BYPASS_S + 0.1
    queue = (
        waiting(100, age_s=3.0),
        waiting(900, age_s=2.5, for_s=too_long),
        waiting(300, age_s=1.0),
    )
    assert admitted(*queue, free_tokens=500) == [0]


def test_a_stream_before_it_in_order_is_still_admitted():
    big = waiting(900, for_s=MAX_BYPASS_S + 0.1, age_s=9.0)
    falling_silent = waiting(300, started=True, buffered_s=0.1)
    assert admitted(big, falling_silent, free_tokens=500) == [1]


def test_a_stream_that_fitted_before_others_were_admitted_blocks_as_well():
    queue = (
        waiting(600, age_s=9.0),  # never fits
        waiting(300, age_s=8.0),
        waiting(300, age_s=7.0, for_s=MAX_BYPASS_S + 0.1),
        waiting(100, age_s=6.0),
    )
    assert admitted(*queue, free_tokens=500) == [1]


def test_rows_run_out_as_tokens_do():
    assert admitted(waiting(age_s=1.0), waiting(age_s=2.0), free_rows=1) == [1]
    assert admitted(waiting(), free_rows=0) == []


def test_long_waiting_streams_with_time_count_as_first_sounds():
    patient = waiting(started=True, buffered_s=4.0, age_s=30.0, for_s=10.1)
    assert admitted(waiting(), patient) == [1, 0]


@few_examples
@given(view=views())
def test_refused_streams_do_not_fit(view):
    """Unless one before them has waited for too long. Whether a prefill can begin in time is
    decided later (test_protection.py)."""
    ordered = view.waiting.nonzero()[0]
    admit, refused_s = fitting(view, ordered, POLICIES.config.admission)
    left = view.free_tokens - view.prefill_tokens[admit].sum()
    assert len(admit) == 0 or left >= 0
    refused = np.setdiff1d(ordered, admit)
    waited_s = view.now_s - view.since_s[refused]
    assert refused_s == (waited_s.max() if len(refused) else None)
    if view.free_rows > len(admit) and (waited_s <= MAX_BYPASS_S).all():
        assert (view.prefill_tokens[refused] > left).all()


def test_under_memory_pressure_streams_that_hold_much_kv_get_further_ahead():
    pacing = policy_of(("urgency", "pacing"))
    big, small = playing(3.0, kv_tokens=4000), playing(3.0, kv_tokens=50)
    full = {"occupancy": 0.97, "free_tokens": 10}
    assert pacing.decide(view_of(big, small, waiting(), **full)).pause.tolist() == [
        False,
        True,
        False,
    ]
    assert pacing.decide(view_of(big, small)).pause.all()


def test_pacing_ceases_when_a_stream_waits_too_long_for_memory():
    pacing = policy_of(("fcfs", "pacing"))

    def pause(waited_s: float) -> bool:
        view = view_of(paused(9.0, kv_tokens=10), waiting(for_s=waited_s), free_tokens=10)
        return bool(pacing.decide(view).pause[0])

    assert pause(9.9)
    assert not pause(10.1)


# --- boundaries ---


def test_one_that_fits_exactly_is_admitted_and_one_token_more_is_not():
    for tokens, found in ((500, [1]), (501, [])):
        assert admitted(waiting(900, age_s=2.0), waiting(tokens), free_tokens=500) == found
    for tokens, found in ((400, [0, 2]), (401, [0])):
        queue = waiting(100, age_s=3.0), waiting(900, age_s=2.0), waiting(tokens)
        assert admitted(*queue, free_tokens=500) == found
    queue = waiting(10, age_s=4.0), waiting(90, age_s=3.0), waiting(900, age_s=2.0)
    assert admitted(*queue, waiting(400), free_tokens=500) == [0, 1, 3]
    assert admitted(*queue, waiting(401), free_tokens=500) == [0, 1]


def test_streams_that_pass_one_another_share_what_is_left():
    queue = [waiting(900, age_s=9.0)] + [waiting(200, age_s=8.0 - i) for i in range(3)]
    assert admitted(*queue, free_tokens=500) == [1, 2]
    assert admitted(*queue, waiting(100), free_tokens=500) == [1, 2, 4]


def test_rows_count_also_for_streams_that_pass():
    queue = waiting(100, age_s=4.0), waiting(900, age_s=3.0), waiting(100, age_s=2.0), waiting(100)
    assert admitted(*queue, free_tokens=500, free_rows=2) == [0, 2]
    assert admitted(*queue, free_tokens=500, free_rows=1) == [0]
    assert admitted(waiting(), free_rows=-1) == []


def test_the_bound_itself_is_not_beyond_it():
    queue = waiting(900, age_s=9.0, for_s=MAX_BYPASS_S), waiting(300)
    assert admitted(*queue, free_tokens=500) == [1]


def test_the_first_that_waited_too_long_blocks_whatever_others_do():
    too_long = MAX_BYPASS_S + 0.1
    queue = (
        waiting(900, age_s=9.0, for_s=too_long),
        waiting(100, age_s=8.0),
        waiting(800, age_s=7.0, for_s=too_long),
    )
    assert admitted(*queue, free_tokens=500) == []


def test_pacing_ceases_at_the_bound_and_the_engine_is_told_when():
    pacing = policy_of(("fcfs", "pacing"))

    def decided(waited_s: float):
        streams = paused(9.0, kv_tokens=10), waiting(for_s=waited_s), waiting(for_s=1.0)
        return pacing.decide(view_of(*streams, free_tokens=10))

    assert not decided(10.0).pause[0]
    assert decided(4.0).pause[0]
    assert decided(4.0).next_change_s == NOW_S + 6.0


def test_a_wait_for_memory_beyond_the_bound_changes_nothing_by_time_alone():
    both = policy_of(("urgency", "pacing"))
    streams = playing(0.1), paused(5.0), waiting(for_s=10.0, managed=False)
    decided = both.decide(view_of(*streams, free_tokens=10))
    assert not decided.pause.any()
    assert decided.next_change_s > NOW_S
