"""Claims about texts that a talker speaks word for word."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.speakable.pieces import Pieces, spoken_text
from sglang_live.speakable.style import SpeechStyle, is_speakable

WORDS = SpeechStyle(folds=True)
SILENT = [
    "", " \n\t", "\u200b", "\ufeff", "\u00ad", "\u200d", "—", "…", "...", "?!", "*", "()", "#",
    "- - -", "\u0301", "\u202e\u202c", "\u200f", "\ue000", "\ufe0f", "😀", "👨‍👩‍👧", "❤️", "\x07",
    "<break time='1s'/>", "<speak></speak>", "<!-- a remark -->", "```\n```",
    "|---|---|", "「」", "\U000e0041",
]  # fmt: skip
# By the category's letter; a text of one category alone.
SPOKEN_CATEGORIES = ("Ll", "Lu", "Nd")


@pytest.mark.parametrize("style", [None, WORDS], ids=["any talker", "a talker of words"])
@pytest.mark.parametrize("text", SILENT, ids=ascii)
def test_a_text_without_a_letter_or_digit_has_no_sound(text, style):
    assert spoken_text(text, style) == ""


@pytest.mark.parametrize("text", SILENT, ids=ascii)
def test_pieces_say_nothing_of_it_either(text):
    pieces = Pieces()
    assert not any(piece.spoken for piece in (*pieces.add(text), *pieces.end()))


@given(st.text(max_size=40), st.sampled_from([None, WORDS]))
@settings(max_examples=300, deadline=None)
def test_a_text_has_a_letter_or_digit_or_no_sound(text, style):
    spoken = spoken_text(text, style)
    assert spoken == "" or is_speakable(spoken)


@given(st.text(st.characters(exclude_categories=("L", "N", "Cs")), max_size=20))
@settings(max_examples=300, deadline=None)
def test_without_letters_and_digits_a_talker_of_any_script_gets_nothing(text):
    assert spoken_text(text, None) == ""


@given(st.text(st.characters(categories=SPOKEN_CATEGORIES, max_codepoint=0x7F), min_size=1))
@settings(max_examples=100, deadline=None)
def test_letters_and_digits_are_spoken(text):
    assert spoken_text(text, None) == text


@pytest.mark.parametrize(
    ("text", "any_talker", "words"),
    [
        ("Good\u200b morning 😀", "Good morning ", "Good morning."),
        ("Hello <break time='1s'/>there", "Hello  there", "Hello there."),
        ("It costs £1.5m.", "It costs £1.5m.", "It costs one point five million pounds."),
        ("語 and café", "語 and café", "and cafe."),
        ("日本語", "日本語", ""),
        ("2 < 3", "2 < 3", "two less than three."),
        ("a\nb", "a\nb", "a b."),
        ("Ələ", "Ələ", "l."),
    ],
)
def test_what_cannot_be_spoken_is_left_out(text, any_talker, words):
    assert spoken_text(text, None) == any_talker
    assert spoken_text(text, WORDS) == words


def test_a_talker_of_words_gets_ascii_alone():
    letters = "".join(map(chr, range(0x250))) + "ɸꞷƏⱲ"
    assert spoken_text(letters, WORDS).isascii()
    assert all(unicodedata.category(c)[0] in "LPZ" for c in spoken_text(letters, WORDS))
