"""First sounds are delayed as long as necessary, and only where it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.startup_delay import (
    Beginning,
    StartupDelayConfig,
    lateness_s,
    startup_delay_s,
)

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


def delay_s(*late_s: float, company: int = 0, of: int = 0, age_s: float = 1.0) -> float:
    """Of a response that begins beside `company` others; earlier ones, the latest last, began
    beside `of` and were so late."""
    n = len(late_s)
    known = [Beginning(100.0 - age_s - 0.01 * (n - i), of, s) for i, s in enumerate(late_s)]
    return startup_delay_s(known, company, 100.0, CONFIG)


LATE_S = 0.25
NEEDED_S = pytest.approx(LATE_S - CONFIG.bridged_s)


def test_without_known_responses_there_is_no_delay():
    assert delay_s() == 0.0


def test_one_late_response_among_the_latest_eight_causes_a_delay_until_eight_were_in_time():
    assert delay_s(LATE_S, *[0.0] * 7) == NEEDED_S
    assert delay_s(LATE_S, *[0.0] * 8) == 0.0


def test_a_delay_costs_less_than_the_gaps_it_prevents():
    # A delay for all is worth a gap of one in 25 if it is shorter than 4 s / 25.
    many = StartupDelayConfig(n_responses=25)
    for needed_s, expected_s in ((0.15, pytest.approx(0.15)), (0.17, 0.0)):
        known = [Beginning(99.0, 0, needed_s + many.bridged_s)] + [Beginning(99.0, 0, 0.0)] * 24
        assert startup_delay_s(known, 0, 100.0, many) == expected_s
    # The longest one is worth it for two more gaps, not for itself alone.
    assert delay_s(0.1, 0.1, LATE_S, *[0.0] * 5) == NEEDED_S


def test_where_no_delay_suffices_for_one_in_ten_there_is_none():
    too_late_s = CONFIG.max_s + CONFIG.bridged_s + 0.01
    assert delay_s(too_late_s, LATE_S, *[0.0] * 6) == 0.0


def test_only_responses_in_similar_company_count():
    for of, company in ((0, 1), (6, 5), (4, 5), (30, 20), (10, 20)):
        assert delay_s(LATE_S, of=of, company=company) == NEEDED_S
    known = [Beginning(99.0, 0, 0.0), Beginning(99.0, 9, LATE_S)]
    assert startup_delay_s(known, 0, 100.0, CONFIG) == 0.0
    assert startup_delay_s(known, 9, 100.0, CONFIG) == NEEDED_S
    assert startup_delay_s(known, 40, 100.0, CONFIG) == NEEDED_S  # nothing nearer is known


def test_a_response_that_plays_counts_when_its_first_chunks_have_come():
    for age_s, expected in ((0.4, 0.0), (0.6, NEEDED_S)):
        known = [Beginning(100.0 - age_s, 0, LATE_S, ended=False)]
        assert startup_delay_s(known, 0, 100.0, CONFIG) == expected


def test_old_responses_do_not_count():
    assert delay_s(LATE_S, age_s=CONFIG.max_age_s - 1.0) == NEEDED_S
    assert delay_s(LATE_S, age_s=CONFIG.max_age_s + 1.0) == 0.0


def test_a_gap_that_the_player_hides_causes_no_delay():
    assert delay_s(*[CONFIG.bridged_s] * 8) == 0.0


beginnings = st.builds(Beginning, st.floats(0.0, 100.0), st.integers(0, 50), seconds, st.booleans())


@given(st.lists(beginnings, max_size=64), st.integers(0, 50))
def test_no_delay_is_longer_than_the_limit(known, company):
    assert 0.0 <= startup_delay_s(known, company, 100.0, CONFIG) <= CONFIG.max_s
