"""A short voice takes the turn if it begins with a word that does."""

import pytest

from sglang_live.gateway.call.turns.voice_words import takes_turn


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Stop.", None),
        ("Wait, wait!", "en"),
        (" hold  on", "en-GB"),
        ("No.", "xx"),
        ("Warte mal", "de"),
        ("Não!", "pt"),
        ("待ってください", "ja"),
        ("等一下。", "zh"),
        ("잠깐만요", "ko"),
    ],
)
def test_words_that_take_the_turn(text, language):
    assert takes_turn(text, language)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("", None),
        ("Mm-hmm.", None),
        ("Okay, stop", "en"),
        ("Nothing", "en"),
        ("Thank you.", None),
        ("Stopp", "fr"),
        ("うん", "ja"),
        ("...", "en"),
    ],
)
def test_other_words_do_not(text, language):
    assert not takes_turn(text, language)
