"""A voice unlike those of the user's turns is another person's, once enough of it is heard."""

import numpy as np
import pytest

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.interaction.filters.voiceprint import (
    AGAIN,
    LENGTHS,
    HeardVoice,
    Voiceprint,
    parts_of,
)
from sglang_live.interaction.silero import WINDOW_SAMPLES

WINDOW = np.full(WINDOW_SAMPLES, 100, np.int16)
LONGEST = LENGTHS[-1]


def embeddings(angle: float, n_lengths: int = len(LENGTHS)) -> np.ndarray:
    """Of one part of a turn, and of the same by telephone: [n_lengths, 2, 2]."""
    return np.tile(np.float32([np.cos(angle), np.sin(angle)]), (n_lengths, 2, 1))


def knows(*angles: float) -> Voiceprint:
    user = Voiceprint()
    for angle in angles:
        user.learn(embeddings(angle))
    return user


def like(user: Voiceprint, angle: float) -> float:
    return user.similarity(LENGTHS[0], embeddings(angle)[0, 0])


# --- the user ---


def test_nothing_is_known_before_the_first_turn():
    user = Voiceprint()
    assert (user.is_known, user.longest) == (False, 0)
    assert user.similarity(LENGTHS[0], embeddings(0)[0, 0]) is None


def test_of_one_or_two_turns_the_most_similar_counts():
    assert like(knows(0.0), 0.0) == pytest.approx(1)
    assert like(knows(0.0, 1.5), 0.0) == pytest.approx(1)
    assert like(knows(0.0, 1.5), 1.5) == pytest.approx(1)


def test_one_turn_by_another_person_changes_nothing():
    user = knows(0.0, 1.5, 0.0)
    assert like(user, 0.0) == pytest.approx(1)
    assert like(user, 1.5) < 0.1


def test_a_second_person_who_talks_to_the_agent_is_a_user_too():
    user = knows(0.0, 1.5, 0.0, 1.5)
    assert like(user, 0.0) == like(user, 1.5) == pytest.approx(1)


def test_a_user_whose_voice_has_changed_is_known_after_two_turns_and_the_old_voice_is_forgotten():
    user = knows(0.0, 0.0, 0.0, 1.5, 1.5)
    assert like(user, 1.5) == pytest.approx(1)
    for _ in range(3):
        user.learn(embeddings(1.5))
    assert like(user, 0.0) < 0.1


def test_short_turns_are_compared_with_short_voices_only():
    user = Voiceprint()
    user.learn(embeddings(0.0, n_lengths=2))
    assert user.longest == LENGTHS[1]
    assert user.similarity(LENGTHS[1], embeddings(0.0)[0, 0]) == pytest.approx(1)
    assert user.similarity(LENGTHS[2], embeddings(0.0)[0, 0]) is None


# --- what is learnt of a turn ---


def turn_of(seconds: float, level: float = 3000.0) -> np.ndarray:
    rng = np.random.default_rng(2)
    return rng.normal(0, level, int(seconds * INPUT_RATE_HZ)).astype(np.int16)


@pytest.mark.parametrize(
    "pcm",
    [np.zeros(0, np.int16), np.ones(1, np.int16), np.zeros(80_000, np.int16), turn_of(0.9)],
    ids=["no audio", "one sample", "silence", "too short"],
)
def test_too_little_voice_teaches_nothing(pcm):
    assert parts_of(pcm) == ([], [])


def test_of_a_turn_its_last_voice_is_learnt_without_its_pauses():
    pause = np.zeros(2 * INPUT_RATE_HZ, np.int16)
    parts, lengths = parts_of(np.concatenate((turn_of(3.0), pause, turn_of(3.0))))
    assert lengths == [n * WINDOW_SAMPLES for n in LENGTHS]
    assert {len(part) for part in parts} == {LONGEST * WINDOW_SAMPLES}
    assert len(parts) == 20
    assert min(np.abs(part[:-WINDOW_SAMPLES]).mean() for part in parts) > 1000


def test_a_turn_is_learnt_as_by_telephone_too():
    parts, _ = parts_of(turn_of(3.0))
    as_heard, narrow = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    for wide, small in zip(as_heard, narrow, strict=True):
        power = np.abs(np.fft.rfft(small.astype(float))) ** 2
        hz = np.fft.rfftfreq(len(small), 1 / INPUT_RATE_HZ)
        assert power[(hz > 250) & (hz < 3500)].sum() > 0.95 * power.sum()
        assert wide.astype(float).std() > 1.4 * small.astype(float).std()


def test_a_user_by_telephone_is_as_similar_as_in_the_turn_as_by_telephone():
    user = Voiceprint()
    heard, narrow = embeddings(0.0)[:, :1], embeddings(1.5)[:, :1]
    user.learn(np.concatenate((heard, narrow), axis=1))
    assert like(user, 0.0) == like(user, 1.5) == pytest.approx(1)


def test_a_shorter_turn_has_shorter_parts():
    parts, lengths = parts_of(turn_of(1.1))
    assert lengths == [n * WINDOW_SAMPLES for n in LENGTHS if n <= 30]
    assert {len(part) for part in parts} == {30 * WINDOW_SAMPLES}


# --- the voice ---


def hear(voice: HeardVoice, n: int, is_voice: bool, similarity: float | None = None) -> list[int]:
    """Lengths in windows of what was due, each compared with this similarity."""
    lengths = []
    for _ in range(n):
        voice.hear([WINDOW], [is_voice])
        while (due := voice.due(LONGEST)) is not None:
            lengths.append(len(due) // WINDOW_SAMPLES)
            voice.compared(similarity)
    return lengths


def test_a_voice_is_compared_at_each_length_and_then_twice_a_second():
    voice = HeardVoice()
    assert hear(voice, LONGEST + 2 * AGAIN, True, 0.59) == [*LENGTHS, LONGEST, LONGEST]


def test_a_burst_of_windows_is_compared_once():
    voice = HeardVoice()
    voice.hear([WINDOW] * 64, [True] * 64)
    assert len(voice.due(LONGEST)) == LONGEST * WINDOW_SAMPLES
    voice.compared(0.9)
    assert voice.due(LONGEST) is None


def test_a_similar_voice_must_not_outlast_anything():
    voice = HeardVoice()
    hear(voice, LENGTHS[0], True, 0.9)
    assert (voice.state, voice.outlast_ms) == ("near", 0)


def test_a_voice_between_the_bounds_is_waited_for_and_then_believed():
    voice = HeardVoice()
    hear(voice, 21, True, 0.65)
    assert (voice.state, voice.outlast_ms) == ("unsure", 704)
    hear(voice, 1, True, 0.65)
    assert (voice.state, voice.outlast_ms) == ("near", 0)


def test_an_unlike_voice_is_far_until_it_resembles_the_user():
    voice = HeardVoice()
    hear(voice, 22, True, 0.4)
    assert (voice.state, voice.outlast_ms) == ("far", 0)
    hear(voice, 8, True, 0.61)
    assert voice.state == "near"


def test_a_far_voice_stays_far_over_its_pauses_but_not_for_long():
    voice = HeardVoice()
    hear(voice, 22, True, 0.4)
    hear(voice, 20, False)
    assert voice.state == "far"
    hear(voice, 27, False)
    assert (voice.state, voice.voiced_ms) == ("unsure", 0)


def test_the_voice_after_a_pause_is_compared_anew():
    voice = HeardVoice()
    hear(voice, 12, True, 0.9)
    hear(voice, 7, False)
    assert (voice.state, voice.voiced_ms) == ("unsure", 0)
    assert hear(voice, 8, True, 0.3) == [8]
    assert voice.state == "far"


def test_without_a_comparison_an_unsure_voice_is_believed():
    voice = HeardVoice()
    hear(voice, 8, True, None)
    assert (voice.state, voice.outlast_ms, voice.is_certain) == ("near", 0, False)


def test_without_a_comparison_a_far_voice_stays_far():
    voice = HeardVoice()
    hear(voice, 22, True, 0.4)
    hear(voice, 8, True, None)
    assert voice.state == "far"


def test_only_half_a_second_of_a_voice_is_certain():
    voice = HeardVoice()
    hear(voice, 14, True, 0.9)
    assert (voice.state, voice.is_certain) == ("near", False)
    hear(voice, 1, True, 0.9)
    assert voice.is_certain


def test_a_voice_longer_than_what_is_known_is_compared_by_its_end():
    voice = HeardVoice()
    voice.hear([WINDOW] * 40, [True] * 40)
    assert len(voice.due(12)) == 12 * WINDOW_SAMPLES
    assert voice.due(12) is None
    voice.hear([WINDOW] * AGAIN, [True] * AGAIN)
    assert len(voice.due(12)) == 12 * WINDOW_SAMPLES
    assert voice.due(0) is None
