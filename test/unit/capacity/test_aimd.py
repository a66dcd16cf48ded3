"""The limit rises while there is slack, falls without, and settles in between."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.capacity.aimd import Aimd, AimdConfig
from sglang_live.capacity.deadlines import Verdict

NOTHING = Verdict(None)


def took(share: float, n_late_sessions: int = 5) -> Verdict:
    return Verdict(share, n_late_sessions)


def judged(**settings) -> Aimd:
    """One of which each late window counts."""
    return Aimd(AimdConfig(few_s=0.0, **settings))


def test_it_rises_by_half_of_the_slack_that_is_left():
    aimd = Aimd(AimdConfig(first=40))
    aimd.window(took(0.5), n_sessions=40)
    assert aimd.limit == 50
    aimd.window(took(0.9), n_sessions=50)
    assert aimd.limit == 52
    aimd.window(took(0.99), n_sessions=52)
    assert aimd.limit == 53


def test_the_share_is_expected_to_grow_with_the_sessions_that_are_to_come():
    aimd = Aimd(AimdConfig(first=40))
    aimd.window(took(0.5), n_sessions=40, n_new=8)
    assert aimd.limit == 40 + 7, "as with a share of 0.625"
    aimd.window(took(0.5), n_sessions=47, n_new=24)
    assert aimd.limit == 47
    aimd.window(took(0.5), n_sessions=47, n_new=47)
    assert aimd.limit == 47
    aimd.window(NOTHING, n_sessions=47, n_new=47)
    assert aimd.limit == 48


def test_sessions_that_are_to_come_are_not_late():
    aimd = Aimd(AimdConfig(first=40))
    aimd.window(took(0.9), n_sessions=40, n_new=30)
    assert aimd.limit == 40


@pytest.mark.parametrize("verdict", [took(0.1), NOTHING])
def test_it_stays_while_it_is_not_reached(verdict):
    aimd = Aimd(AimdConfig(first=40))
    aimd.window(verdict, n_sessions=39)
    assert aimd.limit == 40


def test_where_nothing_was_due_it_rises_one_by_one():
    aimd = Aimd(AimdConfig(first=40))
    aimd.window(NOTHING, n_sessions=40)
    assert aimd.limit == 41


def test_it_falls_below_the_sessions_that_were_too_many():
    aimd = judged(first=40)
    aimd.window(took(1.1), n_sessions=30)
    assert aimd.limit == 27
    aimd.window(took(3.0), n_sessions=29)  # they have not closed
    assert aimd.limit == 27
    aimd.window(took(1.1), n_sessions=27)
    assert aimd.limit == 24


def test_one_late_session_does_not_lower_the_limit():
    aimd = Aimd(AimdConfig(first=40))
    aimd.window(took(9.0, n_late_sessions=1), n_sessions=30)
    assert aimd.limit == 40


def test_a_short_disturbance_does_not_lower_the_limit():
    aimd = Aimd(AimdConfig(first=8, passing=3))
    aimd.limit = 40
    aimd.window(took(0.5), n_sessions=38)
    for _ in range(2):
        aimd.window(took(9.0), n_sessions=10)
    assert aimd.limit == 40
    aimd.window(took(0.5), n_sessions=10)
    for _ in range(2):
        aimd.window(took(9.0), n_sessions=10)
    assert aimd.limit == 40
    aimd.window(took(9.0), n_sessions=10)  # it does not pass
    assert aimd.limit == 9


def test_on_a_server_that_is_late_with_few_sessions_the_target_is_higher():
    """On a slow machine, or where all prompts are long."""
    aimd = judged(first=4, slack=1.5)
    aimd.window(took(2.0, n_late_sessions=1), n_sessions=1)
    for n_sessions in range(2, 5):
        aimd.window(took(2.9), n_sessions)
    assert aimd.limit == 5
    aimd.window(took(3.1), n_sessions=5)
    assert aimd.limit == 4


def test_failed_turns_of_one_session_do_not_raise_the_target():
    aimd = judged(first=8)
    aimd.window(took(math.inf, n_late_sessions=1), n_sessions=1)
    aimd.window(took(1.1), n_sessions=8)
    assert aimd.limit == 7


def test_a_server_that_was_quiet_can_be_late_later():
    aimd = judged(first=8)
    for share in (0.0, 0.9):
        aimd.window(took(share), n_sessions=4)
    aimd.window(took(1.2), n_sessions=8)
    assert aimd.limit == 7


def test_the_limit_never_falls_below_the_least():
    aimd = judged(first=3, least=2)
    aimd.window(took(0.5), n_sessions=1)
    for _ in range(10):
        aimd.window(took(9.0), n_sessions=aimd.limit)
    assert aimd.limit == 2


def test_once_slack_has_run_out_it_rises_by_one_and_later_in_large_steps_again():
    aimd = judged(first=40, forgets=10)
    aimd.window(took(0.1), n_sessions=20)
    aimd.window(took(1.1), n_sessions=40)
    limits = []
    for _ in range(12):
        aimd.window(took(0.1), n_sessions=aimd.limit)
        limits.append(aimd.limit)
    assert limits[:10] == [*range(37, 47)]
    assert limits[10] == 46 + int(46 * 0.9 / 2)


def test_with_few_sessions_the_limit_rises_rarely():
    aimd = judged(first=4, probe=20)
    aimd.window(took(1.1), n_sessions=4)
    limits = []
    for _ in range(12):
        aimd.window(took(0.1), n_sessions=aimd.limit)
        limits.append(aimd.limit)
    assert limits == [3] * 6 + [4] * 5 + [5]


VERDICTS = st.just(NOTHING) | st.builds(Verdict, st.floats(0, 50), st.integers(0, 9))


@given(st.lists(st.tuples(VERDICTS, st.integers(0, 100))))
def test_the_limit_is_at_least_two_after_any_windows(windows):
    aimd = Aimd()
    for verdict, n_sessions in windows:
        aimd.window(verdict, n_sessions)
        assert aimd.limit >= 2


@pytest.mark.parametrize("most", [6, 25, 60, 200])
@pytest.mark.parametrize("curve", ["straight", "queue"])
def test_a_ramp_settles_near_the_capacity(most, curve):
    """512 sessions at 8 a second, as in Metronome; each lasts for two minutes on average."""
    rng, aimd, ends = random.Random(1), Aimd(AimdConfig(first=4)), []
    peak, late = 0, []
    for window in range(400):
        now_s = 5.0 * window
        ends = [end_s for end_s in ends if end_s > now_s]
        for _ in range(40):
            if len(ends) < aimd.limit:
                ends.append(now_s + rng.expovariate(1 / 120))
        n = len(ends)
        share = n / (most + 0.5)
        if curve == "queue":
            share = 0.2 / max(0.05, 1 - 0.8 * share)
        aimd.window(took(share * rng.uniform(0.97, 1.03)), n)
        peak = max(peak, n)
        if window > 100:
            late.append(n)
    assert peak <= 1.1 * most + 1
    assert 0.9 * most - 1 <= sum(late) / len(late) <= 1.05 * most + 1


_COUNTS = ("first", "least", "increase", "probe", "passing", "forgets")
_BAD = [{"decrease": 1.0}, {"target": 0.0}, {"slack": 0.9}, *({name: 0} for name in _COUNTS)]


@pytest.mark.parametrize("bad", _BAD)
def test_settings_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError):
        AimdConfig(**bad)


# --- boundaries ---


def test_a_window_that_takes_all_of_its_budget_is_in_time():
    aimd = judged(first=8)
    aimd.window(took(1.0), n_sessions=8)
    assert aimd.limit == 9
    aimd.window(took(0.8), n_sessions=8)
    aimd.window(took(1.2), n_sessions=9)  # one and a half times 0.8
    assert aimd.limit == 10


def test_two_late_sessions_are_enough():
    aimd = judged(first=8)
    aimd.window(took(1.1, n_late_sessions=2), n_sessions=8)
    assert aimd.limit == 7


def test_more_sessions_than_the_limit_say_nothing_and_as_many_do():
    for n_sessions, limit in ((11, 10), (10, 9)):
        aimd = judged(first=10)
        aimd.window(took(1.1), n_sessions)
        assert aimd.limit == limit


def test_the_fewest_sessions_are_never_too_many():
    aimd = judged(first=8, least=4)
    aimd.window(took(1.1), n_sessions=4)
    assert aimd.limit == 8
    aimd.window(took(1.1), n_sessions=5)
    assert aimd.limit == 4


@pytest.mark.parametrize(("n_sessions", "limit"), [(4, 2), (3, 10)])
def test_a_fall_at_once_needs_nearly_as_many_sessions_as_were_in_time(n_sessions, limit):
    aimd = Aimd(AimdConfig(first=2, decrease=0.5))
    aimd.limit = 10
    aimd.window(took(0.1), n_sessions=8)
    aimd.window(took(1.1), n_sessions=n_sessions)
    assert aimd.limit == limit


def test_what_was_in_time_before_a_fall_is_not_proven_after_it():
    aimd = Aimd(AimdConfig(first=30))
    aimd.limit = 40
    aimd.window(took(0.1), n_sessions=39)
    aimd.window(took(1.1), n_sessions=40)
    assert aimd.limit == 36
    aimd.window(took(1.1), n_sessions=33)  # nine tenths of 36, not of 39
    assert aimd.limit == 29


def test_the_quietest_window_sets_the_target_for_all():
    aimd = judged(first=8)
    for share in (2.0, 4.0):
        aimd.window(Verdict(share, 1), n_sessions=1)
    assert aimd.limit == 8
    aimd.window(took(0.9), n_sessions=4)
    aimd.window(took(1.4), n_sessions=8)  # late beyond 1.35
    assert aimd.limit == 7


@pytest.mark.parametrize(
    "edge",
    [
        {"slack": 1.0},
        {"first": 1, "least": 1, "increase": 1},
        {"probe": 1, "passing": 1, "forgets": 1},
    ],
)
def test_settings_at_their_bounds_are_accepted(edge):
    assert AimdConfig(**edge)


@pytest.mark.parametrize(
    "bad", [{"decrease": 0.0}, {"decrease": 1.02}, {"target": math.inf}, {"slack": math.inf}]
)
def test_settings_beyond_their_bounds_are_refused(bad):
    with pytest.raises(ValueError):
        AimdConfig(**bad)


def test_after_a_fall_it_rises_when_the_windows_sessions_reach_the_probe():
    aimd = judged(first=10, probe=18)
    aimd.window(took(2.0), n_sessions=10)
    assert aimd.limit == 9
    aimd.window(took(0.5), n_sessions=9)
    assert aimd.limit == 9
    aimd.window(took(0.5), n_sessions=9)
    assert aimd.limit == 10
