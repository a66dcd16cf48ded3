"""Whether KV is loaded while its user speaks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.kv.preload import Admit, PreloadConfig, PreloadView, Skip, Wait, judge

CONFIG = PreloadConfig(safety=2.0, retry_s=0.05)
# Takes 0.1 s on an idle link, twice of which fits easily into the 2 s there are.
EASY = PreloadView(
    now_s=100.0,
    needed_at_s=102.0,
    n_tokens=1000,
    n_bytes=10**9,
    bytes_per_s=1e10,
    latency_s=0.0,
    queued_bytes=0,
    others_tokens=0,
    own_tokens=0,
    cap_tokens=4000,
    free_tokens=1500,
    later_tokens=0,
)


def judged(**changes):
    return judge(replace(EASY, **changes), CONFIG)


def test_with_room_and_time_all_of_it_is_admitted():
    assert judged() == Admit(1000)
    assert judged(queued_bytes=2 * 10**9, latency_s=0.5) == Admit(1000)


def test_what_is_used_later_makes_room():
    assert judged(free_tokens=300, later_tokens=700) == Admit(1000)
    assert judged(free_tokens=-50, later_tokens=1000) == Admit(1000)


def test_as_much_is_admitted_as_there_is_room_for():
    assert judged(free_tokens=300, later_tokens=699) == Admit(999, "memory")
    assert judged(free_tokens=1, later_tokens=0) == Admit(1, "memory")
    assert judged(others_tokens=3001) == Admit(999, "cap")
    assert judged(others_tokens=3001, free_tokens=5) == Admit(5, "memory")


def test_parts_of_a_session_count_together():
    assert judged(others_tokens=1, own_tokens=3500) == Admit(499, "cap")
    assert judged(others_tokens=0, own_tokens=3500) == Admit(1000)
    assert judged(others_tokens=1000, own_tokens=3500) == Wait(100.05, "cap")


@pytest.mark.parametrize(("left_s", "verdict"), [(0.25, Admit), (0.15, Skip)])
def test_it_must_fit_before_its_need_with_room_for_error(left_s, verdict):
    assert isinstance(judged(needed_at_s=100.0 + left_s), verdict)


def test_without_a_measured_link_it_is_skipped():
    assert judged(bytes_per_s=None) == Skip("link_unmeasured")


@pytest.mark.parametrize("empty", [{"n_tokens": 0}, {"n_bytes": 0}])
def test_an_empty_preload_is_skipped(empty):
    assert judged(**empty) == Skip("nothing")


@pytest.mark.parametrize(
    ("pressure", "reason"),
    [
        ({"queued_bytes": 15 * 10**9}, "queue"),
        ({"others_tokens": 4000}, "cap"),
        ({"free_tokens": 0, "later_tokens": 0}, "memory"),
        ({"free_tokens": -100, "later_tokens": 0}, "memory"),
        ({"has_row": False}, "rows"),
    ],
)
def test_pressure_is_waited_out_as_long_as_it_could_still_be_in_time(pressure, reason):
    assert judged(**pressure) == Wait(100.05, reason)
    last_s = 102 - CONFIG.safety * 0.1
    assert isinstance(judged(**pressure, now_s=last_s - 0.06), Wait)
    assert judged(**pressure, now_s=last_s - 0.04) == Skip(reason)


def test_a_session_longer_than_the_cap_is_admitted_alone():
    long = {"n_tokens": 4001, "free_tokens": 4001}
    assert judged(**long) == Admit(4001)
    assert judged(**long, others_tokens=1) == Admit(3999, "cap")


def test_a_wait_ends_when_the_next_look_would_be_too_late():
    assert isinstance(judged(others_tokens=4000, needed_at_s=100.26), Wait)
    assert judged(others_tokens=4000, needed_at_s=100.24) == Skip("cap")
    assert judged(queued_bytes=10**12, needed_at_s=100.24) == Skip("queue")


def views() -> st.SearchStrategy[PreloadView]:
    """Near every bound: each verdict is drawn often."""
    return st.builds(
        PreloadView,
        now_s=st.floats(100, 100.7),
        needed_at_s=st.floats(100.5, 103),
        n_tokens=st.integers(1, 2000),
        n_bytes=st.integers(1, 5 * 10**9),
        bytes_per_s=st.floats(5e9, 1e11),
        latency_s=st.floats(0, 0.1),
        queued_bytes=st.integers(0, 10**10),
        others_tokens=st.integers(0, 2000) | st.just(0),
        own_tokens=st.integers(0, 2000) | st.just(0),
        cap_tokens=st.integers(1800, 4000),
        free_tokens=st.integers(0, 2000),
        later_tokens=st.integers(0, 2000),
    )


@settings(max_examples=200)
@given(view=views())
def test_what_is_admitted_is_in_time_under_the_cap_and_has_room(view):
    verdict = judge(view, CONFIG)
    if isinstance(verdict, Admit):
        cost_s = view.latency_s + (view.queued_bytes + view.n_bytes) / view.bytes_per_s
        assert view.now_s + cost_s <= view.needed_at_s
        preloaded = view.others_tokens + view.own_tokens + verdict.n_tokens
        assert preloaded <= view.cap_tokens or not view.others_tokens
        assert 0 < verdict.n_tokens <= view.free_tokens + view.later_tokens
        assert (verdict.n_tokens < view.n_tokens) == bool(verdict.limited_by)


@settings(max_examples=200)
@given(view=views())
def test_a_preload_that_waits_can_be_in_time_afterwards(view):
    verdict = judge(view, CONFIG)
    if isinstance(verdict, Wait):
        assert view.now_s < verdict.until_s
        assert verdict.until_s + view.n_bytes / view.bytes_per_s <= view.needed_at_s


@settings(max_examples=100)
@given(view=views())
def test_waiting_comes_to_an_end(view):
    for _ in range(100):
        verdict = judge(view, CONFIG)
        if not isinstance(verdict, Wait):
            return
        view = replace(view, now_s=verdict.until_s)
    raise AssertionError("still waiting")


@pytest.mark.parametrize("bad", [{"safety": 0.9}, {"retry_s": 0.0}, {"max_expected_share": 1.1}])
def test_bad_constants_are_refused(bad):
    with pytest.raises(ValueError):
        PreloadConfig(**bad)


# --- boundaries; all numbers are sums of powers of two, so that sums are exact ---

EXACT = PreloadConfig(safety=2.0, retry_s=2**-4)
# Takes 0.25 s on an idle link.
EXACT_VIEW = replace(EASY, now_s=64.0, needed_at_s=66.0, n_bytes=2**28, bytes_per_s=2.0**30)


def exact(**changes):
    return judge(replace(EXACT_VIEW, **changes), EXACT)


def test_a_transfer_that_just_fits_with_its_safety_is_admitted():
    assert exact(needed_at_s=64.5) == Admit(1000)
    assert exact(needed_at_s=64.5 - 2**-10) == Skip("too_late")
    assert exact(latency_s=0.25, needed_at_s=65.0) == Admit(1000)
    assert exact(latency_s=0.25, needed_at_s=65.0 - 2**-10) == Skip("too_late")


def test_a_queue_that_just_fits_is_no_reason_to_wait():
    assert exact(queued_bytes=2**28, needed_at_s=65.0) == Admit(1000)
    assert exact(queued_bytes=2**28, needed_at_s=65.0 - 2**-10) == Wait(64.0625, "queue")


def test_the_cap_may_be_reached():
    assert exact(others_tokens=3000) == Admit(1000)
    assert exact(others_tokens=3001) == Admit(999, "cap")
    assert exact(others_tokens=3999) == Admit(1, "cap")
    assert exact(others_tokens=4000) == Wait(64.0625, "cap")


def test_a_wait_may_last_until_the_last_moment():
    full = {"others_tokens": 4000}
    assert exact(**full, needed_at_s=64.5 + 2**-4) == Wait(64.0625, "cap")
    assert exact(**full, needed_at_s=64.5 + 2**-4 - 2**-10) == Skip("cap")


def test_the_smallest_transfer_is_one():
    assert exact(n_tokens=1, n_bytes=1, latency_s=0.25) == Admit(1)
    assert exact(n_tokens=1, n_bytes=1, free_tokens=0, later_tokens=1) == Admit(1)


@pytest.mark.parametrize(
    "edge",
    [{"safety": 1.0}, {"max_protected_share": 0.0, "max_expected_share": 1.0}],
)
def test_constants_at_their_bounds_are_accepted(edge):
    assert PreloadConfig(**edge)


@pytest.mark.parametrize(
    "bad",
    [
        {"safety": float("inf")},
        {"retry_s": float("inf")},
        {"max_protected_share": -0.1},
        {"max_protected_share": 1.1},
    ],
)
def test_constants_beyond_their_bounds_are_refused(bad):
    with pytest.raises(ValueError):
        PreloadConfig(**bad)
