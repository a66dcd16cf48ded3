"""Statistics of a user and of all users of a server."""

import pytest

from sglang_live.interaction.user_stats import UserPrior, UserStats


def test_a_gap_of_minutes_counts_as_thirty_seconds():
    user_stats = UserStats()
    user_stats.add_gap(1.0)
    user_stats.add_gap(600.0)
    assert user_stats.response_gap_s == pytest.approx(1.0 + 0.3 * 29.0)


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
