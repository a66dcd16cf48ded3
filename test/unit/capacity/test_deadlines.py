"""Lateness of the server, by deadlines that came and by overdue ones."""

import math

import pytest

from sglang_live.capacity.deadlines import DeadlineConfig, Deadlines, Kind, Verdict

CONFIG = DeadlineConfig(quantile=0.9, window_s=5.0, least=4, patience_s=20.0)


@pytest.fixture
def deadlines() -> Deadlines:
    deadlines = Deadlines(CONFIG)
    assert deadlines.verdict(0.0) is None
    return deadlines


def test_a_window_has_a_verdict_when_it_is_over(deadlines):
    for share in (0.1, 0.2, 0.3, 0.4):
        deadlines.count("a", share)
    assert deadlines.verdict(4.9) is None
    assert deadlines.verdict(5.0) == Verdict(0.4, 1)
    assert deadlines.verdict(9.9) is None
    assert deadlines.verdict(10.0) == Verdict(None)


def test_the_slowest_tenth_may_be_slower(deadlines):
    for n, share in enumerate((*[0.2] * 9, 7.0)):
        deadlines.count(f"s{n}", share)
    assert deadlines.verdict(5.0) == Verdict(0.2, 10)


def test_the_verdict_counts_the_sessions_that_were_that_slow(deadlines):
    for n in range(20):
        deadlines.count(f"s{n % 4}", 2.0 if n % 4 < 2 else 0.1)
    assert deadlines.verdict(5.0) == Verdict(2.0, 2)


def test_flows_in_time_do_not_hide_first_packets_that_are_late(deadlines):
    for n in range(10):
        deadlines.count(f"s{n}", 2.0 if n < 2 else 0.5)
        deadlines.count(f"s{n}", 0.0, Kind.FLOW)
    assert deadlines.verdict(5.0) == Verdict(2.0, 2)


def test_first_packets_in_time_do_not_hide_flows_that_are_late(deadlines):
    for n in range(10):
        deadlines.count(f"s{n}", 0.5)
        deadlines.count(f"s{n}", 3.0 if n < 2 else 0.0, Kind.FLOW)
    assert deadlines.verdict(5.0) == Verdict(3.0, 2)
    for n in range(10):
        deadlines.count(f"s{n}", 0.0, Kind.FLOW)
    assert deadlines.verdict(10.0) == Verdict(0.0, 10)


def test_a_deadline_is_timed_from_its_beginning(deadlines):
    numbers = [deadlines.begin("a", 1.0, budget_s=0.5) for _ in range(4)]
    for number, now_s in zip(numbers, (1.1, 1.2, 1.3, 1.4), strict=True):
        deadlines.came(number, now_s)
        deadlines.came(number, now_s + 1)  # it came already
    verdict = deadlines.verdict(5.0)
    assert (verdict.share, verdict.n_late_sessions) == (pytest.approx(0.8), 1)


def test_few_deadlines_extend_the_window_up_to_its_longest_duration(deadlines):
    deadlines.count("a", 3.0)
    assert deadlines.verdict(5.0) is None
    assert deadlines.verdict(19.9) is None
    assert deadlines.verdict(20.0) == Verdict(3.0, 1)


def test_an_overdue_deadline_counts_by_its_age(deadlines):
    """A stalled engine has nothing that could be timed."""
    for n in range(4):
        deadlines.begin(f"s{n}", 1.0, budget_s=0.5)
    assert deadlines.verdict(5.0) == Verdict(8.0, 4)
    assert deadlines.verdict(10.0) == Verdict(18.0, 4)


def test_an_overdue_deadline_counts_although_its_turn_was_given_up(deadlines):
    for n in range(4):
        deadlines.abandoned(deadlines.begin(f"s{n}", 1.0, budget_s=0.5), 2.0)
        deadlines.abandoned(deadlines.begin(f"s{n}", 1.0, budget_s=0.5), 1.5)
    assert deadlines.verdict(5.0) == Verdict(2.0, 4)


def test_text_in_time_says_nothing_and_overdue_text_is_late(deadlines):
    numbers = [deadlines.begin(f"s{n}", 1.0, 2.0, Kind.TEXT) for n in range(4)]
    for number in numbers:
        deadlines.came(number, 1.5)
    assert deadlines.verdict(5.0) == Verdict(None)
    for n in range(4):
        deadlines.begin(f"s{n}", 6.0, 2.0, Kind.TEXT)
        deadlines.count(f"s{n}", 0.5)
    assert deadlines.verdict(10.0) == Verdict(2.0, 4)


def test_a_verdict_has_the_duration_of_its_window(deadlines):
    assert deadlines.verdict(7.0).lasted_s == 7.0


def test_a_deadline_that_is_not_due_does_not_count(deadlines):
    deadlines.begin("a", 4.8, budget_s=0.5)
    assert deadlines.verdict(5.0) == Verdict(None)


def test_a_dropped_deadline_does_not_count(deadlines):
    number = deadlines.begin("a", 1.0, budget_s=0.5)
    deadlines.gone(number)
    deadlines.came(number, 3.0)
    deadlines.empty(number)
    assert deadlines.verdict(5.0) == Verdict(None)


def test_an_empty_deadline_is_infinitely_late(deadlines):
    for n in range(4):
        deadlines.empty(deadlines.begin(f"s{n}", 1.0, budget_s=0.5))
    assert deadlines.verdict(5.0) == Verdict(math.inf, 4)


# --- boundaries ---


def test_one_deadline_short_of_the_least_extends_the_window(deadlines):
    for _ in range(3):
        deadlines.count("a", 0.5)
    assert deadlines.verdict(5.0) is None
    deadlines.count("a", 0.7)
    assert deadlines.verdict(6.0) == Verdict(0.7, 1)


def test_a_deadline_at_its_moment_is_not_overdue(deadlines):
    deadlines.begin("a", 1.0, budget_s=4.0)
    assert deadlines.verdict(5.0) == Verdict(None)
    deadlines.begin("b", 1.0, budget_s=0.5)
    for _ in range(3):
        deadlines.count("c", 0.1)
    assert deadlines.verdict(10.0) == Verdict(18.0, 1)


def test_a_window_begins_when_the_one_before_was_judged():
    deadlines = Deadlines(CONFIG)
    assert deadlines.verdict(100.0) is None
    assert deadlines.verdict(104.9) is None
    assert deadlines.verdict(106.0) == Verdict(None)
    assert deadlines.verdict(110.9) is None
    assert deadlines.verdict(111.0) == Verdict(None)
