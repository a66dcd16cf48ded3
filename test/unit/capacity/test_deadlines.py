"""How late the server is, by what came and by what did not."""

import math

import pytest

from sglang_live.capacity.deadlines import DeadlineConfig, Deadlines, Verdict

CONFIG = DeadlineConfig(quantile=0.9, window_s=5.0, least=4, patience_s=20.0)


@pytest.fixture
def beats() -> Deadlines:
    beats = Deadlines(CONFIG)
    assert beats.verdict(0.0) is None
    return beats


def test_a_window_has_a_verdict_when_it_is_over(beats):
    for share in (0.1, 0.2, 0.3, 0.4):
        beats.count("a", share)
    assert beats.verdict(4.9) is None
    assert beats.verdict(5.0) == Verdict(0.4, 1)
    assert beats.verdict(9.9) is None
    assert beats.verdict(10.0) == Verdict(None)


def test_the_slowest_tenth_may_be_slower(beats):
    for n, share in enumerate((*[0.2] * 9, 7.0)):
        beats.count(f"s{n}", share)
    assert beats.verdict(5.0) == Verdict(0.2, 10)


def test_it_says_how_many_sessions_were_that_slow(beats):
    for n in range(20):
        beats.count(f"s{n % 4}", 2.0 if n % 4 < 2 else 0.1)
    assert beats.verdict(5.0) == Verdict(2.0, 2)


def test_a_beat_is_timed_from_when_it_began(beats):
    numbers = [beats.begin("a", 1.0, budget_s=0.5) for _ in range(4)]
    for number, now_s in zip(numbers, (1.1, 1.2, 1.3, 1.4), strict=True):
        beats.came(number, now_s)
        beats.came(number, now_s + 1)  # it came already
    verdict = beats.verdict(5.0)
    assert (verdict.share, verdict.n_late_sessions) == (pytest.approx(0.8), 1)


def test_few_beats_make_no_verdict_before_patience_ends(beats):
    beats.count("a", 3.0)
    assert beats.verdict(5.0) is None
    assert beats.verdict(19.9) is None
    assert beats.verdict(20.0) == Verdict(3.0, 1)


def test_what_does_not_come_counts_by_its_age(beats):
    """A stalled engine has nothing that could be timed."""
    for n in range(4):
        beats.begin(f"s{n}", 1.0, budget_s=0.5)
    assert beats.verdict(5.0) == Verdict(8.0, 4)
    assert beats.verdict(10.0) == Verdict(18.0, 4)


def test_what_need_not_come_counts_when_it_comes(beats):
    """A reply may turn out to be a call of a function."""
    numbers = [beats.begin("a", 1.0, budget_s=0.5, must_come=False) for _ in range(4)]
    assert beats.verdict(5.0) == Verdict(None)
    for number in numbers:
        beats.came(number, 6.0)
    assert beats.verdict(10.0) == Verdict(10.0, 1)


def test_what_is_not_late_yet_does_not_count(beats):
    beats.begin("a", 4.8, budget_s=0.5)
    assert beats.verdict(5.0) == Verdict(None)


def test_what_nobody_waits_for_does_not_count(beats):
    number = beats.begin("a", 1.0, budget_s=0.5)
    beats.gone(number)
    beats.came(number, 3.0)
    beats.empty(number)
    assert beats.verdict(5.0) == Verdict(None)


def test_an_empty_beat_is_as_late_as_can_be(beats):
    for n in range(4):
        beats.empty(beats.begin(f"s{n}", 1.0, budget_s=0.5))
    assert beats.verdict(5.0) == Verdict(math.inf, 4)
