"""Claims about the voice's parts that need no weights."""

import numpy as np
import pytest

from sglang_live.errors import BadInputError
from sglang_live.models.hibari import capped, readable
from sglang_live.models.phoneme_voice import (
    MAX_CHARACTERS,
    Phoneme,
    PhonemeVoice,
    Word,
    pieces,
    stripped,
    word_ends,
)


class FakeReader:
    """Each letter is a phoneme; sentences end with a full stop."""

    def read(self, text):
        words, sentences, end = [], [], 0
        for sentence in filter(None, text.split(". ")):
            phonemes = []
            for written in sentence.split():
                end = text.index(written, end) + len(written)
                phonemes += [Phoneme(sign, len(words)) for sign in f"{written} "]
                words.append(Word(written, end))
            sentences.append(list(stripped(phonemes)))
        return words, sentences


class FakeNetwork:
    """Every phoneme sounds for 10 ms at full scale times 1.5."""

    sample_rate_hz, max_phonemes, times_phonemes = 1000, 400, True

    def __init__(self):
        self.pieces = []

    def speak(self, piece, voice):
        self.pieces.append(piece)
        ends = np.arange(1, len(piece) + 1, dtype=np.int64) * 10
        return np.full(ends[-1], 1.5, np.float32), ends


def voice() -> PhonemeVoice:
    return PhonemeVoice(FakeNetwork(), FakeReader(), ["heart"])


def signs(text: str) -> list[Phoneme]:
    return [Phoneme(sign, 0) for sign in text]


def written(phonemes) -> str:
    return "".join(phoneme.sign for phoneme in phonemes)


def test_words_end_with_their_last_sounding_phoneme_across_sentences():
    speech = voice().synthesise("ab cde. f", "heart")
    ends = [(word.end, round(word.end_s, 3)) for word in speech.words]
    assert ends == [(2, 0.02), (6, 0.06), (9, 0.07)]
    assert len(speech.pcm) == 70
    assert speech.pcm.dtype == np.int16 and speech.pcm.max() == 32767


def test_the_end_of_a_word_is_before_its_punctuation():
    speech = voice().synthesise("ab,,, cd", "heart")
    assert [round(word.end_s, 3) for word in speech.words] == [0.02, 0.08]


def test_a_text_without_a_speakable_character_is_silent():
    speech = voice().synthesise("", "heart")
    assert len(speech.pcm) == 0 and speech.words == ()


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("a" * (MAX_CHARACTERS + 1), "heart", "has 1001 characters; at most 1000"),
        ("a", "emma", "Unknown voice 'emma': heart can be used"),
    ],
)
def test_what_is_beyond_the_limits_is_refused(text, name, message):
    with pytest.raises(BadInputError, match=message):
        voice().synthesise(text, name)


def test_a_sentence_of_many_phonemes_is_spoken_in_pieces():
    own = voice()
    speech = own.synthesise("abcd " * 199, "heart")
    assert max(len(piece) for piece in own._network.pieces) <= 400
    assert len(speech.words) == 199
    assert all(a.end_s < b.end_s for a, b in zip(speech.words, speech.words[1:], strict=False))


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("ab cd", ["ab cd"]),
        ("ab, cd ef gh", ["ab,", "cd ef gh"]),
        ("ab cd ef gh", ["ab cd ef", "gh"]),
        ("abcdefghijkl", ["abcdefghij", "kl"]),
        ("a b, c d, e f", ["a b, c d,", "e f"]),
    ],
)
def test_pieces_end_with_a_clause_or_else_with_a_word(text, cut):
    assert [written(piece) for piece in pieces(signs(text), 10)] == cut


@pytest.mark.parametrize(
    ("word", "result"),
    [
        ("don't", "don't"),
        ("$1,250.99", "$1,250.99"),
        ("m²", "m2"),
        ("①", "1"),
        ("a\u202e\x00b\u200d", "ab"),
        ("%" * 1000, "%%%"),
        ("1" * 16, " ".join("1" * 16)),
        ("1" * 15, "1" * 15),
        ("\x00", ""),
        ("[a](/b/)", "a](/b/)"),
    ],
)
def test_words_that_the_rules_fail_at_are_replaced(word, result):
    assert readable(word) == result


def test_words_longer_than_any_english_word_are_cut():
    assert [len(word) for word in capped("x" * 100 + " yes").split()] == [40, 40, 20, 3]


def test_a_word_without_sound_ends_with_the_one_before():
    words = [Word("a", 1), Word("–", 3), Word("b", 5)]
    assert word_ends(words, [(2, 0.9), (0, 0.1), (0, 0.4)]) == [(1, 0.4), (3, 0.4), (5, 0.9)]


def test_spaces_at_the_ends_are_not_spoken():
    assert written(stripped(signs("  a b "))) == "a b"
    assert written(stripped(signs("  "))) == ""
