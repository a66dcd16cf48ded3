"""First sounds are delayed as long as necessary, and only where it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.startup_delay import StartupDelayConfig, lateness_s, startup_delay_s

CONFIG = StartupDelayConfig()
seconds = st.floats(0.0, 2.0)


def test_chunks_in_time_need_no_delay():
    assert lateness_s([(5.0, 0.16), (5.1, 0.16), (5.3, 0.32)]) == 0.0
    assert lateness_s([(5.0, 0.16)]) == lateness_s([]) == 0.0


def test_lateness_is_the_longest_wait_of_the_listener_for_a_chunk():
    assert lateness_s([(5.0, 0.16), (5.25, 0.16), (5.4, 0.32)]) == pytest.approx(0.09)


@given(st.lists(st.tuples(seconds, st.floats(0.02, 0.4)), min_size=1, max_size=20))
def test_a_delay_of_the_lateness_leaves_no_gap(steps):
    arrivals, at_s = [], 0.0
    for step_s, duration_s in steps:
        at_s += step_s
        arrivals.append((at_s, duration_s))
    begins_s = arrivals[0][0] + lateness_s(arrivals)
    played_until_s = begins_s
    for at_s, duration_s in arrivals:
        assert at_s <= played_until_s + 1e-9
        played_until_s += duration_s


def test_without_known_responses_there_is_no_delay():
    assert startup_delay_s([], 0, CONFIG) == 0.0


def test_one_late_response_among_many_causes_no_delay():
    assert startup_delay_s([(0, 0.0)] * 39 + [(0, 0.25)], 0, CONFIG) == 0.0
    often = [(0, 0.0)] * 9 + [(0, 0.25)]
    assert startup_delay_s(often, 0, CONFIG) == 0.25 - CONFIG.bridged_s


def test_only_responses_in_similar_company_count():
    known = [(0, 0.0), (0, 0.0), (5, 0.2), (6, 0.25)]
    assert startup_delay_s(known, 0, CONFIG) == 0.0
    assert startup_delay_s(known, 5, CONFIG) == 0.25 - CONFIG.bridged_s
    assert startup_delay_s(known, 9, CONFIG) == 0.25 - CONFIG.bridged_s  # nothing nearer is known


def test_a_gap_that_the_player_hides_causes_no_delay():
    assert startup_delay_s([(0, CONFIG.bridged_s)] * 9, 0, CONFIG) == 0.0


@given(st.lists(st.tuples(st.integers(0, 50), seconds), max_size=64), st.integers(0, 50))
def test_no_delay_is_longer_than_the_limit(known, company):
    assert 0.0 <= startup_delay_s(known, company, CONFIG) <= CONFIG.max_s


def test_one_late_response_in_twenty_counts_and_one_in_twenty_one_does_not():
    late = [(0, 0.25)]
    assert startup_delay_s([(0, 0.0)] * 19 + late, 0, CONFIG) == 0.25 - CONFIG.bridged_s
    assert startup_delay_s([(0, 0.0)] * 20 + late, 0, CONFIG) == 0.0


def test_responses_in_the_company_of_one_more_or_fewer_are_similar():
    for company in (4, 6):
        known = [(5, 0.0), (company, 0.25)]
        assert startup_delay_s(known, 5, CONFIG) == 0.25 - CONFIG.bridged_s
    for company in (3, 7):
        assert startup_delay_s([(5, 0.0), (company, 0.25)], 5, CONFIG) == 0.0
