"""Claims about the words of any text, and about the spelling of any number."""

import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_live.speakable.letters import roman
from sglang_live.speakable.numbers import MAX_DIGITS, cardinal, number, ordinal, year
from sglang_live.speakable.style import SpeechStyle
from sglang_live.speakable.words import wording_of

# What the steps look for, so that they meet each other's traces.
FRAGMENTS = st.sampled_from(
    ["Dr", ".", ". ", " ", "5", "12", "2024", "-", "–", "/", ":", "$", "€", "%", "°C", " km", "x",
     "^", "*", "**", "_", "`", "```", "\n", "\n\n", "# ", "- ", "1. ", "> ", "|", "[a]", "(b)", "(",
     ")", "https://", "a.com", "@", "#", "&", "&amp;", "<b>", "<", ">", "=", "+", "~", "\\", "IV",
     "\\frac{1}{2}", "\\(", "USA", "GPU", "NASA", "Louis ", "Chapter ", "e.g.", "etc.", "a.m.",
     "May ", "'", "’", "s", "th", "A", "I", "é", "ß", "你", "П", "😀", "½", "²", "ª", "№", "…", "—",
     "!", "?", ",", ";", "St", "No", "p", "Ph.D.", "v", "C", ".py", "and", "a "]
)  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=2000),
    st.lists(FRAGMENTS, max_size=60).map("".join),
    st.text("0123456789.,:/- "),
)
FORM = re.compile(r"[^\W\d_]+(?:[ .,!?;:'-]|[^\W\d_])*")


def is_latin(char: str) -> bool:
    return unicodedata.name(char, "").startswith("LATIN")


@given(TEXTS, st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
@example("<\n>" * 400, True, True)
@example("9" * 2000, True, False)
@example("12:30" + "9" * 80 + "a" * 40 + "z", True, True)
def test_only_letters_and_basic_punctuation_are_said(text, starts_line, closes):
    speech = wording_of(text, starts_line=starts_line, closes=closes)
    assert speech.words == "" or FORM.fullmatch(speech.words)
    assert all(is_latin(char) for char in speech.words if char.isalpha())
    assert speech.n_unspeakable <= len(unicodedata.normalize("NFKC", text))


@given(TEXTS)
@settings(max_examples=400, deadline=None)
def test_words_are_said_as_they_are(text):
    words = wording_of(text).words
    assert wording_of(words).words == words


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_a_voice_that_folds_says_ascii_where_letters_have_it(text):
    words = wording_of(text, SpeechStyle(folds=True)).words
    assert not set(words) & set("éèüöäñçÅøßæœł")


@given(st.integers(0, 10**MAX_DIGITS - 1))
def test_numbers_are_words(n):
    assert re.fullmatch(r"[a-z]+(?:[ -][a-z]+)*", cardinal(n))
    assert re.fullmatch(r"[a-z]+(?:[ -][a-z]+)*", ordinal(n))


def test_all_small_numbers_differ():
    assert len({cardinal(n) for n in range(12_000)}) == 12_000
    assert len({ordinal(n) for n in range(12_000)}) == 12_000


@pytest.mark.parametrize("n", [-1, 10**MAX_DIGITS])
def test_numbers_out_of_range_are_refused(n):
    with pytest.raises(ValueError, match="at most"):
        cardinal(n)


@pytest.mark.parametrize(
    ("n", "words"),
    [(1066, "ten sixty-six"), (1800, "eighteen hundred"), (1999, "nineteen ninety-nine"),
     (2000, "two thousand"), (2010, "twenty ten"), (476, "four hundred seventy-six")]
)  # fmt: skip
def test_years(n, words):
    assert year(n) == words


def test_numbers_beyond_the_scales_are_said_digit_by_digit():
    assert number("1" * (MAX_DIGITS + 1)) == " ".join(["one"] * (MAX_DIGITS + 1))


@pytest.mark.parametrize(("text", "n"), [("IV", 4), ("XIV", 14), ("XC", 90), ("MCMXCIX", 1999)])
def test_roman_numerals(text, n):
    assert roman(text) == n
