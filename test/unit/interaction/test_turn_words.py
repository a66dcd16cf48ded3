"""Words that end within a sentence are evidence that the turn goes on; all others are none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.interaction.turn_end import (
    MOST_WORDS,
    WORD_WEIGHTS,
    features,
    trained_word_weights,
    word_evidence,
    words_of,
)


@pytest.mark.parametrize(
    "text",
    [
        "I would like to book a flight to",
        "And then, um.",
        "We could do that, but...",
        "So I was thinking about the",
        "That's because",
    ],
)
def test_a_sentence_that_breaks_off_is_evidence_against_the_end(text):
    assert word_evidence(text) < -0.1


@pytest.mark.parametrize(
    "text",
    [
        "Yes.",
        "Okay, thank you.",
        "I would like a cappuccino please",
        "What do you think?",
        "Can you tell me how it works",
        "That's it",
    ],
)
def test_a_complete_sentence_is_no_evidence(text):
    assert word_evidence(text) == 0


@given(st.text(max_size=200))
def test_words_never_say_that_the_turn_is_over(text):
    assert word_evidence(text) <= 0


def test_punctuation_and_capitals_do_not_count():
    assert (
        word_evidence("AND THEN, UM.")
        == word_evidence("and then um")
        == word_evidence("And then… um?")
    )
    assert words_of("It’s the_same -- isn't it?") == ["it's", "the_same", "--", "isn't", "it"]


@pytest.mark.parametrize("text", ["", "  ", "...", "?!"])
def test_without_words_there_is_no_evidence(text):
    assert word_evidence(text) == 0


def test_only_english_words_are_evidence():
    text = "And then, um."
    assert (
        word_evidence(text, "en")
        == word_evidence(text, "en-GB")
        == word_evidence(text, "English")
        < 0
    )
    assert word_evidence(text, "de") == word_evidence(text, "german") == 0


@pytest.mark.parametrize(
    "text",
    [
        "Ich möchte gern einen Flug nach",
        "Und dann habe ich so",
        "Je voudrais réserver une table pour",
        "Quiero ir a la",
        "Vorrei prenotare un tavolo per",
    ],
)
def test_an_unknown_language_is_not_taken_for_english(text):
    assert word_evidence(text) == 0


def test_a_long_text_counts_by_its_last_words():
    text = "we could do that " * MOST_WORDS + "and then um"
    assert len(words_of(text)) == MOST_WORDS
    assert word_evidence(text) < 0


def test_features_are_the_last_words_the_first_and_the_length():
    assert features(["so", "we", "could"]) == [
        "could",
        "we could",
        "so we could",
        "-we",
        "^so we",
        "#2",
    ]
    assert features(["yes"]) == ["yes", " yes", "  yes", "-", "^", "#1"]


def test_the_weights_say_what_they_were_fitted_to():
    document = json.loads(WORD_WEIGHTS.read_text())
    assert {"what", "data", "licences", "figures_of_groups_kept_apart"} <= document.keys()
    assert document["figures_of_groups_kept_apart"]["auc_of_complete_sentences"] > 0.8
    assert len(trained_word_weights().features) > 1000
