"""Statistics of a user and of all users of a server."""

import pytest

from sglang_live.interaction.user_stats import UserPrior, UserStats
from sglang_live.policy.view import FIRST_INTERRUPTS


def test_a_gap_of_minutes_counts_as_thirty_seconds():
    user_stats = UserStats()
    user_stats.add_gap(1.0)
    user_stats.add_gap(600.0)
    assert user_stats.response_gap_s == pytest.approx(1.0 + 0.3 * 29.0)


def test_a_new_user_begins_with_the_averages_of_the_server():
    prior = UserPrior()
    first = UserStats(prior)
    assert first.interrupts == FIRST_INTERRUPTS
    for _ in range(200):
        first.add_response(interrupted=False)
    assert prior.interrupts < 0.01
    assert UserStats(prior).interrupts == prior.interrupts


def test_one_response_moves_the_averages_of_the_server_less_than_those_of_its_user():
    prior = UserPrior()
    user = UserStats(prior)
    user.add_response(interrupted=True)
    assert prior.interrupts == pytest.approx(0.98 * FIRST_INTERRUPTS + 0.02)
    assert user.interrupts == pytest.approx(0.7 * FIRST_INTERRUPTS + 0.3)


def test_a_new_user_begins_with_the_pace_that_the_talker_has_shown():
    prior = UserPrior()
    first = UserStats(prior)
    first.add_pace(n_tokens=100, n_frames=500)
    assert prior.frames_per_token == 5.0, "the first response replaces the constant"
    second = UserStats(prior)
    assert second.frames_per_token == 5.0
    first.add_pace(n_tokens=100, n_frames=600)
    assert second.frames_per_token == prior.frames_per_token == 5.5
    second.add_pace(n_tokens=100, n_frames=650)
    assert second.frames_per_token == pytest.approx(5.5 + 0.3 * 1.0)
