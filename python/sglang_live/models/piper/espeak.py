"""Phonemes of other languages: those of the program espeak-ng, or the text's own characters."""

import re
import subprocess
import unicodedata
from collections.abc import Container, Iterator, Sequence

from sglang_live.errors import LiveError
from sglang_live.models.phonemes import CLAUSE_ENDS, Phoneme, Word
from sglang_live.models.piper.files import ESPEAK

_TIMEOUT_S = 10.0
_SENTENCE_ENDS = frozenset(".!?")
# Of a word in another language, as in "(en)".
_LANGUAGE = re.compile(r"\([\w-]+\)")


class CharacterReader:
    """A TextReader of a voice that was trained on characters."""

    def __init__(self, alphabet: Container[str]) -> None:
        self._alphabet = alphabet

    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        words = words_of(text)
        sentences = [
            [
                Phoneme(sign, number)
                for number in clause
                for sign in _signs(f"{words[number].written.casefold()} ")
                if sign in self._alphabet
            ]
            for clause in clauses_of(words)
        ]
        return words, sounding(sentences)


class EspeakReader:
    """A TextReader. The program is started once for each clause."""

    def __init__(self, language: str, alphabet: Container[str]) -> None:
        """language: as the program names it."""
        self._language = language
        self._alphabet = alphabet

    def read(self, text: str) -> tuple[list[Word], list[list[Phoneme]]]:
        """Raises LiveError if the program fails."""
        words = words_of(text)
        sentences = [list(self._clause(words, clause)) for clause in clauses_of(words)]
        return words, sounding(sentences)

    def _clause(self, words: Sequence[Word], numbers: Sequence[int]) -> Iterator[Phoneme]:
        written = " ".join(words[number].written for number in numbers)
        groups = self._phonemes_of(written).split()
        for at, group in enumerate(groups):
            number = numbers[_place(at, len(groups), len(numbers))]
            for sign in _signs(f"{group} " if at + 1 < len(groups) else group):
                if sign in self._alphabet:
                    yield Phoneme(sign, number)
        if groups:
            end = written[-1] if written[-1] in CLAUSE_ENDS else ""
            yield from (Phoneme(sign, numbers[-1]) for sign in f"{end} " if sign in self._alphabet)

    def _phonemes_of(self, clause: str) -> str:
        command = [ESPEAK, "-q", "--ipa", "-b", "1", "-v", self._language, "--stdin"]
        try:
            done = subprocess.run(
                command, input=clause.encode(), capture_output=True, timeout=_TIMEOUT_S, check=True
            )
        except subprocess.CalledProcessError as error:
            cause = error.stderr.decode(errors="replace").strip() or f"exit {error.returncode}"
            raise LiveError(f"{ESPEAK} failed for {self._language}: {cause}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LiveError(f"{ESPEAK} failed: {error}") from error
        return _LANGUAGE.sub("", done.stdout.decode(errors="replace"))


def words_of(text: str) -> list[Word]:
    return [Word(found[0], found.end()) for found in re.finditer(r"\S+", text)]


def clauses_of(words: Sequence[Word]) -> Iterator[list[int]]:
    """Numbers of the words up to each mark of punctuation."""
    clause: list[int] = []
    for number, word in enumerate(words):
        clause.append(number)
        if word.written[-1] in CLAUSE_ENDS:
            yield clause
            clause = []
    if clause:
        yield clause


def sounding(clauses: Sequence[list[Phoneme]]) -> list[list[Phoneme]]:
    """Sentences of clauses; without those that make no sound."""
    sentences: list[list[Phoneme]] = [[]]
    for clause in clauses:
        sentences[-1] += clause
        if any(phoneme.sign in _SENTENCE_ENDS for phoneme in clause):
            sentences.append([])
    return [s for s in sentences if any(not phoneme.is_silent for phoneme in s)]


def _place(at: int, n_groups: int, n_words: int) -> int:
    """Number of the word that a group of phonemes is of. Figures become several groups, some words
    are joined to one: the places of both are alike."""
    if n_groups >= n_words:
        return at * n_words // n_groups
    return ((at + 1) * n_words - 1) // n_groups


def _signs(text: str) -> str:
    """The networks know combining marks by themselves."""
    return unicodedata.normalize("NFD", text)
