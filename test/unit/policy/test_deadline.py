"""VoxServe's order: first sounds first, few at a time; then the nearest deadline."""

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import U0, U1, U2

from .views import playing, policy_of, starting, view_of, waiting

POLICIES = policy_of(("deadline",), PolicyConfig().changed({"deadline.n_startup_max": 2}))


def admitted(*streams) -> list[int]:
    return POLICIES.decide(view_of(*streams)).admit.tolist()


def test_a_stream_is_critical_within_a_second_of_its_deadline():
    view = view_of(playing(0.9), playing(1.1), starting())
    assert POLICIES.decide(view).urgency.tolist() == [U0, U2, U1]


def test_few_start_at_a_time_the_oldest_first():
    assert admitted(waiting(age_s=1.0), waiting(age_s=3.0), waiting(age_s=2.0)) == [1, 2]
    assert admitted(starting(), waiting(age_s=3.0), waiting(age_s=2.0)) == [1]
    assert admitted(starting(), starting(), waiting()) == []


def test_a_stream_without_a_first_sound_in_time_blocks_no_others():
    assert admitted(starting(for_s=6.0), starting(for_s=7.0), waiting()) == [2]


def test_startups_come_before_steady_streams_and_those_by_deadline():
    steady = {"started": True}
    queue = waiting(buffered_s=3.0, **steady), waiting(buffered_s=0.2, **steady), waiting()
    assert admitted(*queue) == [2, 1, 0]


def test_a_stream_without_a_listener_takes_no_startup_of_others():
    own = waiting(managed=False, age_s=9.0)
    assert admitted(own, waiting(age_s=2.0), waiting(age_s=1.0)) == [0, 1, 2]


def test_a_startup_that_is_as_old_as_the_bound_counts_no_longer():
    assert admitted(starting(for_s=4.9), starting(), waiting()) == []
    assert admitted(starting(for_s=5.0), starting(), waiting()) == [2]


def test_steady_streams_that_waited_for_long_are_ordered_among_startups_by_age():
    long = waiting(started=True, buffered_s=5.0, age_s=2.5, for_s=10.1)
    at_the_bound = waiting(started=True, buffered_s=5.0, age_s=9.0, for_s=10.0)
    queue = waiting(age_s=3.0), waiting(age_s=2.0), long, at_the_bound
    assert admitted(*queue) == [0, 2, 1, 3]
