"""A voice far softer and duller than the user's turns is another person's."""

import numpy as np
import pytest

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.interaction.filters.backchannels import has_hiss
from sglang_live.interaction.filters.side_talk import SideTalk, sound_of
from sglang_live.interaction.silero import WINDOW_SAMPLES

N = 40  # windows
VOICED = np.full(N, 0.9, np.float32)
TIMES = np.arange(N * WINDOW_SAMPLES) / INPUT_RATE_HZ


def voice(db: float = 0.0, hiss: float = 0.1) -> np.ndarray:
    """A hum of 200 Hz with some hiss above 2 kHz. db: beside the user's level."""
    noise = np.random.default_rng(3).normal(0, 1, len(TIMES))
    sound = np.sin(2 * np.pi * 200 * TIMES) + hiss * np.diff(noise, prepend=0)
    return (8000 * 10 ** (db / 20) * sound).astype(np.int16)


def heard_of(user: SideTalk, pcm: np.ndarray, scores: np.ndarray = VOICED) -> float:
    """Share of the windows that may be the user's."""
    return float((user.without_others(scores, 0.5, pcm) >= 0.5).mean())


@pytest.fixture
def user():
    known = SideTalk()
    known.learn(voice())
    return known


def test_level_and_tilt_are_those_of_the_sound():
    sound = sound_of(voice(hiss=0))
    assert len(sound.power) == N
    assert 10 * np.log10(sound.power).mean() == pytest.approx(
        20 * np.log10(8000 / 32768 / np.sqrt(2)), abs=0.2
    )
    assert sound.tilts_db.max() < -30
    assert sound_of(np.zeros(0, np.int16)).power.shape == (0,)


def test_before_the_first_turn_every_voice_may_be_the_users():
    assert heard_of(SideTalk(), voice(-30, hiss=0)) == 1.0


@pytest.mark.parametrize(
    ("db", "hiss", "share"),
    [(0, 0.1, 1.0), (-6, 0.05, 1.0), (-15, 0.1, 1.0), (0, 0.0, 1.0)],
)
def test_a_voice_that_is_only_softer_or_only_duller_is_the_users(user, db, hiss, share):
    assert heard_of(user, voice(db, hiss)) == share


def test_a_voice_that_is_both_is_not_but_for_its_first_windows(user):
    assert heard_of(user, voice(-15, hiss=0.02)) == 2 / N


def test_after_a_silence_the_next_voice_is_compared_anew(user):
    heard_of(user, voice(-15, hiss=0.02))
    silence = np.zeros(7, np.float32)
    user.without_others(silence, 0.5, np.zeros(7 * WINDOW_SAMPLES, np.int16))
    assert heard_of(user, voice()) == 1.0


def test_a_user_who_moves_away_is_followed_after_two_turns(user):
    away = voice(-12, hiss=0.05)
    assert heard_of(user, away) < 0.1
    user.learn(away)
    user.learn(away)
    assert heard_of(user, away) == 1.0


@pytest.mark.parametrize("pcm", [np.zeros(0), np.zeros(16_000), np.ones(800)], ids=len)
def test_silence_and_short_audio_teach_nothing(pcm):
    fresh = SideTalk()
    fresh.learn(pcm.astype(np.int16))
    assert not fresh.is_known


def test_a_hum_has_no_hiss_and_a_room_adds_none():
    room = np.random.default_rng(4).normal(0, 40, len(TIMES)).astype(np.int16)
    hum = np.concatenate((room[: 2 * WINDOW_SAMPLES], voice(hiss=0) + room))
    assert not has_hiss(hum.astype(np.int16))
    assert not has_hiss(np.zeros(0, np.int16))


def test_one_window_of_hiss_is_enough():
    pcm = voice(hiss=0)
    hiss = np.random.default_rng(5).normal(0, 3000, WINDOW_SAMPLES)
    pcm[5 * WINDOW_SAMPLES : 6 * WINDOW_SAMPLES] = np.diff(hiss, prepend=0).astype(np.int16)
    assert has_hiss(pcm)
