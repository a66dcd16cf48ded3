"""Moonshine's vocabulary: pieces of text by token id."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from sglang_live.errors import BadInputError

# <unk>, <s>, </s> and <<ST_0>> to <<ST_767>>, which mark nothing that is said.
_SPECIAL = re.compile(rb"<unk>|</?s>|<<ST_\d+>>")
_SPACE = "▁".encode()


class Vocabulary:
    """Pieces of text by token id; special tokens are empty."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [b"" if _SPECIAL.fullmatch(piece) else piece for piece in pieces]

    def __len__(self) -> int:
        return len(self._pieces)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read tokenizer.bin: for each token its length and its bytes.

        A length is one byte below 128, or two: its low seven bits plus 128, and its high bits.

        Raises:
            BadInputError: the file is cut.
        """
        data = path.read_bytes()
        pieces: list[bytes] = []
        at = 0
        while at < len(data):
            length = data[at]
            at += 1
            if length >= 128:
                length += 128 * data[at] - 128 if at < len(data) else 0
                at += 1
            pieces.append(data[at : at + length])
            at += length
        if at > len(data):
            raise BadInputError(f"{path} is cut: delete its directory, so that it is fetched again")
        return cls(pieces)

    def text(self, ids: Iterable[int]) -> str:
        """The tokens' text, without spaces at its ends.

        A character that was cut by the limit of tokens is left out.
        """
        joined = b"".join(self._pieces[token] for token in ids).replace(_SPACE, b" ")
        return " ".join(joined.decode(errors="ignore").split())
