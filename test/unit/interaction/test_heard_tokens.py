"""Audio to tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.core import FRAME_S
from sglang_live.interaction.playback import PRIOR_FRAMES_PER_TOKEN, heard_tokens


def heard(heard_s, n_tokens=10, n_frames=40, spoken=True, frames_per_token=4.0):
    return heard_tokens(
        heard_s,
        n_tokens=n_tokens,
        n_frames=n_frames,
        spoken=spoken,
        frames_per_token=frames_per_token,
    )


def test_the_prior_is_ordinary_english_speech():
    words_a_minute = 12.5 / PRIOR_FRAMES_PER_TOKEN * 60 / 1.3
    assert words_a_minute == pytest.approx(155)


def test_complete_audio_spreads_its_tokens_evenly():
    assert [heard(frames * FRAME_S) for frames in (3, 4, 8, 20, 39)] == [0, 1, 2, 5, 9]


def test_complete_audio_heard_in_full_is_all_of_the_text():
    assert heard(40 * FRAME_S) == 10
    assert heard(100.0) == 10
    # More tokens than steps could have read: only the end shows that all belong to the audio.
    assert heard(5 * FRAME_S, n_tokens=30, n_frames=6) == 6
    assert heard(6 * FRAME_S, n_tokens=30, n_frames=6) == 30


def test_a_last_frame_that_is_missing_costs_at_least_a_token():
    assert heard(39.9 * FRAME_S) == 9


def test_incomplete_audio_is_counted_by_the_users_pace():
    assert heard(20 * FRAME_S, spoken=False, frames_per_token=5.0) == 4
    assert heard(1000 * FRAME_S, spoken=False) == 10


def test_no_token_is_heard_before_the_talker_had_it():
    assert heard(3 * FRAME_S, spoken=False, frames_per_token=0.1) == 4


def test_nothing_heard_is_no_token():
    assert heard(0.0) == 0
    assert heard(5.0, n_tokens=0) == 0
    # Less than a token is none, too.
    assert heard(FRAME_S) == 0


def test_complete_audio_of_unknown_length_is_counted_by_the_pace():
    assert heard(8 * FRAME_S, n_frames=0) == 2


@given(
    st.lists(st.floats(0.0, 60.0), min_size=2, max_size=8).map(sorted),
    st.integers(0, 300),
    st.integers(0, 700),
    st.booleans(),
    st.floats(0.1, 20.0),
)
def test_the_count_grows_with_the_audio_heard_and_stays_within_its_bounds(
    times_s, n_tokens, n_frames, spoken, pace
):
    counts = [heard(t, n_tokens, n_frames, spoken, pace) for t in times_s]
    assert counts == sorted(counts)
    for time_s, count in zip(times_s, counts, strict=True):
        everything = spoken and n_frames and time_s / FRAME_S >= n_frames - 1e-6
        assert 0 <= count <= n_tokens
        assert everything or count <= time_s / FRAME_S + 1 + 1e-6
        if spoken and n_frames and n_tokens and time_s > 0:
            assert (count == n_tokens) == everything
