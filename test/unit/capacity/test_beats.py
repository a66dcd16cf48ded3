"""How late the server is, by what came and by what did not."""

import math

import pytest

from sglang_live.capacity.beats import Beats, BeatsConfig, Verdict

CONFIG = BeatsConfig(quantile=0.9, window_s=5.0, least=4, patience_s=20.0)


@pytest.fixture
def beats() -> Beats:
    beats = Beats(CONFIG)
    assert beats.verdict(0.0) is None
    return beats


def test_a_window_has_a_verdict_when_it_is_over(beats):
    for share in (0.1, 0.2, 0.3, 0.4):
        beats.count(share)
    assert beats.verdict(4.9) is None
    assert beats.verdict(5.0) == Verdict(0.4)
    assert beats.verdict(9.9) is None
    assert beats.verdict(10.0) == Verdict(None)


def test_the_slowest_tenth_may_be_slower(beats):
    for share in (*[0.2] * 9, 7.0):
        beats.count(share)
    assert beats.verdict(5.0) == Verdict(0.2)


def test_a_beat_is_timed_from_when_it_began(beats):
    numbers = [beats.begin(1.0, budget_s=0.5) for _ in range(4)]
    for number, now_s in zip(numbers, (1.1, 1.2, 1.3, 1.4), strict=True):
        beats.came(number, now_s)
        beats.came(number, now_s + 1)  # it came already
    assert beats.verdict(5.0).share == pytest.approx(0.8)
    assert beats.n_beats == 4


def test_few_beats_make_no_verdict_before_patience_ends(beats):
    beats.count(3.0)
    assert beats.verdict(5.0) is None
    assert beats.verdict(19.9) is None
    assert beats.verdict(20.0) == Verdict(3.0)


def test_what_does_not_come_counts_by_its_age(beats):
    """A stalled engine has nothing that could be timed."""
    for _ in range(4):
        beats.begin(1.0, budget_s=0.5)
    assert beats.verdict(5.0) == Verdict(8.0)
    assert beats.verdict(10.0) == Verdict(18.0)


def test_what_is_not_late_yet_does_not_count(beats):
    beats.begin(4.8, budget_s=0.5)
    assert beats.verdict(5.0) == Verdict(None)


def test_what_nobody_waits_for_does_not_count(beats):
    number = beats.begin(1.0, budget_s=0.5)
    beats.gone(number)
    beats.came(number, 3.0)
    assert beats.verdict(5.0) == Verdict(None)


def test_an_empty_beat_is_as_late_as_can_be(beats):
    for _ in range(4):
        beats.empty(beats.begin(1.0, budget_s=0.5))
    assert beats.verdict(5.0) == Verdict(math.inf)
    assert beats.n_empty == 4
