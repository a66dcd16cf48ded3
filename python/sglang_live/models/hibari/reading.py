"""How a text is read: phoneme ids in pieces, each id with the word that it belongs to.

The package's own rules turn text into phonemes (misaki's, ported; numbers, dates and abbreviations
become words). Here the text is made safe for them, and each phoneme is traced to a word.
"""

import json
import re
import unicodedata
from collections.abc import Container, Iterator, Sequence
from difflib import SequenceMatcher
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from sglang_live.models.packages.code import import_fetched
from sglang_live.models.phonemes import Phoneme, Word

# The rules take time with the third power of a word's length; no English word is longer.
_MAX_WORD = 40
# They have no name for larger numbers, which are read digit by digit.
_MAX_DIGITS = 15
_LONG_NUMBER = re.compile(rf"(?:\d[,.]?){{{_MAX_DIGITS + 1},}}")
_SYMBOL_RUN = re.compile(r"([^\w\s])\1{3,}")


class EnglishReader:
    """Text to phonemes of American English with the package's rules; a TextReader."""

    def __init__(self, package: Any, alphabet: Container[str]) -> None:
        """
        Args:
            package: the imported package.
            alphabet: the phonemes that the model knows.
        """
        rules = import_module(f"{package.__name__}.g2p")
        unknown_words = import_module(f"{package.__name__}.g2p.oov")
        # Otherwise its network is loaded at the first unknown word, which threads would race for.
        self._g2p = rules.G2P(oov=unknown_words.OOV())
        self._normalise = rules.normalize
        self._split = package.Hibari.split_sentences
        self._alphabet = alphabet

    @classmethod
    def load(cls, directory: Path) -> Self:
        """directory: as returned by `fetch(HIBARI)`."""
        return cls(import_fetched(directory, "hibari"), english_alphabet(directory))

    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        """
        Returns:
            The text's words, and the phonemes of each sentence that has some.
        """
        words: list[Word] = []
        sentences = []
        at = 0
        for sentence in self._split(text):
            begin = text.index(sentence, at)
            at = begin + len(sentence)
            in_sentence = [Word(m[0], begin + m.end()) for m in re.finditer(r"\S+", sentence)]
            phonemes = list(self._phonemes(in_sentence, len(words)))
            words += in_sentence
            if not all(phoneme.is_silent for phoneme in phonemes):
                sentences.append(phonemes)
        return words, sentences

    def _phonemes(self, words: Sequence[Word], first: int) -> Iterator[Phoneme]:
        """Phonemes of one sentence, whose first word has the number `first`."""
        given = [
            (part, first + number)
            for number, word in enumerate(words)
            for part in readable(word.written).split()
        ]
        if not given:
            return
        # Capped last: normalising removes the space before a full stop.
        text = capped(self._normalise(" ".join(part for part, _ in given)))
        groups = list(self._groups(text))
        numbers = aligned([part for part, _ in given], [written for written, _ in groups])
        for (_, signs), number in zip(groups, numbers, strict=True):
            for sign in signs:
                if sign in self._alphabet:
                    yield Phoneme(sign, given[number][1])

    def _groups(self, text: str) -> Iterator[tuple[str, str]]:
        """Words of the normalised text, each with its phonemes and the space after it."""
        written, signs = "", ""
        for token in self._g2p.phonemize_tokens(self._g2p.tokenize(text)):
            written += token.text
            signs += token.phonemes or ""
            if token.whitespace:
                yield written, f"{signs} "
                written, signs = "", ""
        if written:
            yield written, signs


def english_alphabet(directory: Path) -> dict[str, int]:
    """Id of each phoneme, in hibari as in Kokoro.

    Args:
        directory: as returned by `fetch(HIBARI)`.
    """
    path = directory / "hibari" / "assets" / "vocab.json"
    alphabet: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    return alphabet


def readable(word: str) -> str:
    """Replace what the package's rules fail at; may return several words, or none."""
    word = "".join(c for c in word if unicodedata.category(c)[0] != "C")
    # Digits in circles and the like; superscripts and fractions are known.
    word = "".join(
        unicodedata.normalize("NFKC", c) if c.isdigit() and c not in "²³" else c for c in word
    )
    word = _LONG_NUMBER.sub(lambda m: " ".join(c for c in m[0] if c.isdigit()), word)
    return _SYMBOL_RUN.sub(r"\1\1\1", word)


def capped(text: str) -> str:
    """Cut words that exceed _MAX_WORD characters."""
    parts = (
        word[at : at + _MAX_WORD] for word in text.split() for at in range(0, len(word), _MAX_WORD)
    )
    return " ".join(parts)


def aligned(before: Sequence[str], after: Sequence[str]) -> list[int]:
    """Index in `before` of each word of `after`, which is the same text normalised.

    Words that were replaced share the indexes of those they replace evenly. Never decreases.
    """
    indexes = []
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, before, after, False).get_opcodes():
        if kind == "insert":
            indexes += [max(0, i1 - 1)] * (j2 - j1)
        else:
            indexes += [i1 + (j - j1) * (i2 - i1) // (j2 - j1) for j in range(j1, j2)]
    return indexes
