"""A talker whose context is short reads the newest messages."""

import pytest

from sglang_live.stages.talker.context import n_left_out


@pytest.mark.parametrize(
    ("lengths", "unread"),
    [
        ([], 0),
        ([60], 0),
        ([78], 0),
        ([79], 1),
        ([40, 38], 0),
        ([40, 39], 1),
        ([1, 79, 1], 2),
        ([79, 79, 10, 10], 2),
        ([10] * 100, 93),
        ([500], 1),
    ],
)
def test_the_oldest_messages_are_left_out_until_the_rest_fits(lengths, unread):
    assert n_left_out(lengths, prefix_tokens=10, most_tokens=100) == unread
