"""The split of long texts into pieces, and the longest duration of each."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.gateway.http.speech_pieces import MAX_PIECE_CHARACTERS, Fades, longest_s, pieces_of

SENTENCE = "The sun went down behind the hills, and the children went home. "


def spaceless(text: str) -> str:
    return re.sub(r"\s", "", text)


@given(st.text(min_size=1, max_size=5000))
def test_no_word_is_lost_and_no_piece_is_long(text):
    pieces = pieces_of(text)
    assert spaceless("".join(pieces)) == spaceless(text)
    assert all(len(piece) <= MAX_PIECE_CHARACTERS for piece in pieces)


@given(st.text(min_size=1, max_size=MAX_PIECE_CHARACTERS))
def test_a_short_text_is_unchanged(text):
    assert pieces_of(text) == [text]


def test_pieces_end_where_sentences_do():
    pieces = pieces_of(SENTENCE * 20)
    assert len(pieces) == 5
    assert all(piece.endswith("home.") for piece in pieces)


def test_sentences_that_are_too_long_are_divided_at_commas_then_at_words():
    assert all(piece.endswith(",") for piece in pieces_of("so we went on and on, " * 60)[:-1])
    words = pieces_of("word " * 500)
    assert all(piece.startswith("word") and piece.endswith("word") for piece in words)


def test_chinese_is_divided_at_its_own_full_stops():
    assert all(piece.endswith("。") for piece in pieces_of("今天天气怎么样。" * 100))


def test_text_without_word_ends_is_divided_between_characters():
    pieces = pieces_of("e\u0301" * 2000)
    assert all(not piece.startswith("\u0301") for piece in pieces)
    assert "".join(pieces) == "e\u0301" * 2000


@pytest.mark.parametrize(
    ("text", "usual_s"),
    [
        (SENTENCE * 4, 17.0),  # 15 characters a second
        ("ten of clubs", 1.1),
        ("今天天气怎么样。", 1.8),
        ("0123456789", 4.0),
        ("ABC DEF", 2.0),
        ("é" * 300, 21.0),
    ],
)
def test_twice_the_usual_duration_is_allowed_and_ten_times_is_not(text, usual_s):
    assert 2 * usual_s <= longest_s(text) <= 10 * usual_s + 4


def test_the_duration_of_any_text_is_bounded():
    assert sum(map(longest_s, pieces_of("é" * 4096))) < 1300
    assert longest_s("é" * MAX_PIECE_CHARACTERS) < 90


# --- joints ---


def faded(pcm: bytes, step: int, **sides: bool) -> np.ndarray:
    fades = Fades(**sides)
    parts = [fades.push(pcm[at : at + step]) for at in range(0, len(pcm), step)]
    return np.frombuffer(b"".join([*parts, fades.finish()]), "<i2")


@pytest.mark.parametrize("step", [2, 100, 240, 3840, 100_000])
@pytest.mark.parametrize("n", [1, 60, 120, 200, 5000])
def test_a_piece_keeps_its_length_and_is_silent_at_its_joints(step, n):
    pcm = np.full(n, 8000, "<i2").tobytes()
    both = faded(pcm, step, fades_in=True, fades_out=True)
    assert len(both) == n
    assert both[0] == 0
    assert both[-1] == 0
    assert np.abs(np.diff(both.astype(int))).max(initial=0) <= (8000 if n < 120 else 140)
    assert faded(pcm, step, fades_in=False, fades_out=False).tolist() == [8000] * n
