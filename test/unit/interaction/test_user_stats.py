"""What is expected of a caller."""

import pytest

from sglang_live.interaction.user_stats import UserStats


def test_who_went_for_coffee_is_not_slow_to_reply():
    user_stats = UserStats()
    user_stats.replied_after(1.0)
    user_stats.replied_after(600.0)
    assert user_stats.response_gap_s == pytest.approx(1.0 + 0.3 * 29.0)
