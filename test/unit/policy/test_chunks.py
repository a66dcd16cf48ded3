"""Sizes and due times of the vocoder's chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.policy.chunks import LEAD_S, SHORT_BELOW_S, Ahead, chunk_frames


def test_playback_goes_on_behind_a_gap():
    ahead = Ahead()
    assert not ahead.has_sound and ahead.is_short(1e9)
    ahead.made(10.0, 0.16)
    ahead.made(10.1, 0.32)
    assert ahead.runs_out_s == pytest.approx(10.48)
    ahead.made(12.0, 0.16)  # after a second and a half of silence
    assert ahead.runs_out_s == pytest.approx(12.16)


def test_a_chunk_is_due_before_the_sound_ends_and_not_before_its_frames_exist():
    ahead = Ahead()
    assert ahead.due_s(3.0) == 3.0
    ahead.made(3.0, 1.0)
    assert ahead.due_s(3.1) == pytest.approx(4.0 - LEAD_S)
    assert ahead.due_s(7.0) == 7.0


def test_a_listener_has_little_left_below_the_limit():
    ahead = Ahead()
    ahead.made(0.0, 1.0)
    assert not ahead.is_short(1.0 - 1.01 * SHORT_BELOW_S)
    assert ahead.is_short(1.0 - 0.99 * SHORT_BELOW_S)


@pytest.mark.parametrize(
    ("n_pending", "is_first", "ends", "expected"),
    [
        (9, True, False, 2),
        (9, True, True, 2),
        (1, True, True, 1),
        (9, False, False, 4),
        (3, False, False, 2),
        (3, False, True, 3),
        (0, False, True, 0),
    ],
)
def test_a_chunk_takes_what_has_gathered(n_pending, is_first, ends, expected):
    assert chunk_frames(n_pending, 2, 4, is_first=is_first, ends=ends) == expected


@given(st.integers(0, 100), st.integers(1, 8), st.integers(1, 8), st.booleans(), st.booleans())
def test_every_frame_comes_in_some_chunk(n_pending, small, large, is_first, ends):
    n = chunk_frames(n_pending, small, large, is_first=is_first, ends=ends)
    assert 0 <= n <= max(small, large) and n <= n_pending
    assert n > 0 or n_pending == 0
