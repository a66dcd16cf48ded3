"""Whisper's vocabulary: tokens by id, in the form that CTranslate2 keeps beside the weights.

A token that is not special is a sequence of bytes, each written as one printable character
(byte-level BPE of GPT-2).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from sglang_live.errors import BadInputError

FILES = ("vocabulary.json", "vocabulary.txt")

START = "<|startoftranscript|>"
END = "<|endoftext|>"
TRANSLATE, TRANSCRIBE = "<|translate|>", "<|transcribe|>"
NO_TIMESTAMPS = "<|notimestamps|>"
# Bytes that are written as themselves; the others follow from 256 on, in order.
_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))


class Vocabulary:
    """Tokens by id."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """
        Raises:
            BadInputError: a token is missing without which nothing can be recognised.
        """
        self._ids = {token: number for number, token in enumerate(tokens)}
        for token in (START, END, NO_TIMESTAMPS):
            if token not in self._ids:
                raise BadInputError(f"the vocabulary lacks {token}: it is none of Whisper's")
        # What follows the text's tokens is special: languages, tasks, timestamps.
        self._texts = [_bytes_of(token) for token in tokens[: self._ids[END]]]

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Raises BadInputError if there is no vocabulary, or it is broken."""
        path = next((directory / name for name in FILES if (directory / name).is_file()), None)
        if path is None:
            raise BadInputError(f"{directory} has no {' or '.join(FILES)}")
        try:
            text = path.read_text(encoding="utf-8")
            tokens = (
                json.loads(text) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
            )
            return cls(tokens)
        except (ValueError, TypeError, KeyError, BadInputError) as error:
            raise BadInputError(f"{path}: {error}") from error

    def id_of(self, token: str) -> int:
        return self._ids[token]

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes that the model detects and takes, such as "de"; empty: it knows English only."""
        # Models of English have the other tokens, too. CTranslate2 tells them apart by this one.
        if "" not in self._ids:
            return ()
        # They stand between the start and the tasks, of which translation is the first.
        ids = range(self._ids[START] + 1, min(self._ids[TRANSCRIBE], self._ids[TRANSLATE]))
        tokens = {number: token for token, number in self._ids.items()}
        return tuple(tokens[number].strip("<|>") for number in ids)

    def text(self, ids: Iterable[int]) -> str:
        """The tokens' text, with its spaces. What is no whole character is left out."""
        whole = b"".join(self._texts[token] for token in ids if token < len(self._texts))
        return whole.decode(errors="ignore")


def byte_characters() -> list[str]:
    """The character of each byte."""
    others = iter(range(256, 512))
    return [chr(byte if byte in _PRINTABLE else next(others)) for byte in range(256)]


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


def _bytes_of(token: str) -> bytes:
    return bytes(_BYTES[character] for character in token)
