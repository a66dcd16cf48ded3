"""The sound of a piece, and the join of its first words with the rest."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.models.speech import Speech, SpokenWord
from sglang_live.stages.vocoder.piece_sound import PieceSound


def tone(hz: float, duration_s: float, phase: float = 0.0) -> np.ndarray:
    t = np.arange(round(duration_s * OUTPUT_RATE_HZ)) / OUTPUT_RATE_HZ
    return (8000 * np.sin(2 * np.pi * hz * t + phase)).astype(np.int16)


def words(*ends_s: float) -> tuple[SpokenWord, ...]:
    return tuple(SpokenWord(4 * n, end_s) for n, end_s in enumerate(ends_s, 1))


def test_another_rate_is_resampled_and_silence_is_cut():
    pcm = np.concatenate([np.zeros(8000, np.int16), np.full(8000, 900, np.int16)])
    sound = PieceSound.of(Speech(pcm=pcm, words=words(0.75, 1.0)), 16_000)
    assert sound.duration_s == pytest.approx(0.53, abs=0.01)
    assert [word.end_s for word in sound.words] == pytest.approx([0.28, 0.53], abs=0.01)


@given(
    st.floats(80, 300), st.floats(0, 6), st.floats(0.2, 0.6), st.floats(0.2, 0.6), st.floats(0, 0.9)
)
@settings(max_examples=60, deadline=None)
def test_voiced_sounds_join_without_a_click(hz, phase, first_s, again_s, more_s):
    begun = PieceSound(tone(hz, first_s + 0.3), words(first_s, first_s + 0.3)).without_last_word()
    whole = PieceSound(tone(hz, again_s + 0.1 + more_s, phase), words(again_s, again_s + more_s))
    joined = np.concatenate([begun.pcm, whole.behind(begun).pcm]).astype(int)
    # A sine of this amplitude rises by no more from one sample to the next.
    steepest = 8000 * 2 * np.pi * hz / OUTPUT_RATE_HZ
    assert np.abs(np.diff(joined)).max() <= 1.3 * steepest + 2
    assert len(begun.words) == 1
    expected = round((first_s + 0.1 + more_s) * OUTPUT_RATE_HZ)
    assert abs(len(joined) - expected) <= 0.012 * OUTPUT_RATE_HZ + 2


def test_words_behind_the_join_keep_their_place():
    begun = PieceSound(tone(100, 1.0), words(0.5, 1.0)).without_last_word()
    whole = PieceSound(tone(100, 2.0), words(0.6, 1.2, 2.0))
    rest = whole.behind(begun)
    assert [word.end for word in rest.words] == [8, 12]
    assert [word.end_s for word in rest.words] == pytest.approx([0.6, 1.4], abs=0.012)


def test_nothing_follows_a_piece_that_has_no_more_words():
    begun = PieceSound(tone(100, 1.0), words(0.5, 1.0)).without_last_word()
    assert len(PieceSound(tone(100, 0.4), words(0.4)).behind(begun).pcm) == 0
