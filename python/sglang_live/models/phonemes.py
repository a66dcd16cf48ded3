"""A text as phonemes, each with its word, and where the words end in the sound."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

CLAUSE_ENDS = frozenset(".,;:!?—…")
_SILENT = CLAUSE_ENDS | frozenset(' "()“”')


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the text between white space; end: index in the text after it."""

    written: str
    end: int


@dataclass(frozen=True, slots=True)
class Phoneme:
    """sign: one character of the model's alphabet; word: number of the word it belongs to."""

    sign: str
    word: int

    @property
    def is_silent(self) -> bool:
        return self.sign in _SILENT


class TextReader(Protocol):
    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        """
        Returns:
            The text's words, and the phonemes of each sentence that has some.
        """
        ...


def pieces(phonemes: Sequence[Phoneme], n_most: int) -> Iterator[Sequence[Phoneme]]:
    """Cut a sentence that exceeds `n_most` phonemes: after a clause, else after a word."""
    while len(phonemes) > n_most:
        spaces = [at for at in range(1, n_most) if phonemes[at].sign == " "]
        clauses = [at for at in spaces if phonemes[at - 1].sign in CLAUSE_ENDS]
        cut = (clauses or spaces or [n_most])[-1]
        yield stripped(phonemes[:cut])
        phonemes = stripped(phonemes[cut:])
    yield stripped(phonemes)


def stripped(phonemes: Sequence[Phoneme]) -> Sequence[Phoneme]:
    """Without spaces at the ends."""
    sounding = [at for at, phoneme in enumerate(phonemes) if phoneme.sign != " "]
    return phonemes[sounding[0] : sounding[-1] + 1] if sounding else ()


def word_ends(
    words: Sequence[Word], ends_s: Iterable[tuple[int, float]]
) -> list[tuple[int, float]]:
    """
    Args:
        ends_s: number of a word, and the end of one of its phonemes in seconds.
    Returns:
        Of each word, its end in the text and in seconds; the latter never decreases.
    """
    latest = [0.0] * len(words)
    for number, end_s in ends_s:
        latest[number] = max(latest[number], end_s)
    result = []
    end_s = 0.0
    for word, own_s in zip(words, latest, strict=True):
        end_s = max(end_s, own_s)
        result.append((word.end, end_s))
    return result
