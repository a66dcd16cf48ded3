"""Which tokens of a response the words of its speech are, for a stage that reads its text aloud.

In: the response's text as it grows, and pieces of it as they are spoken (speakable/). Out: tokens
up to a word of a piece.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from math import ceil

from sglang_live.speakable.pieces import Piece


@dataclass(slots=True)
class TokenPlaces:
    """The text of a response, and which of its tokens are at which character.

    Its parts may have several tokens each, over whose characters these are spread evenly.
    """

    text: str = ""
    _ends: list[int] = field(default_factory=lambda: [0])  # characters up to the end of each part
    _tokens: list[int] = field(default_factory=lambda: [0])  # tokens up to there

    def add(self, text: str, n_tokens: int) -> None:
        """n_tokens: of the response, up to the end of this text."""
        if not text:
            self._tokens[-1] = n_tokens
            return
        self.text += text
        self._ends.append(len(self.text))
        self._tokens.append(n_tokens)

    def up_to(self, piece: Piece, spoken_end: int) -> int:
        """The tokens up to a word of the piece.

        Args:
            spoken_end: end of the word in the piece's spoken text. Where that differs from the
                response's text, as in numbers, its share of the piece is taken.
        """
        source = self.text[piece.source_begin : piece.source_end]
        lead = len(source) - len(source.lstrip())
        if source.strip() == piece.spoken:
            return self._up_to_character(piece.source_begin + lead + spoken_end)
        share = spoken_end / len(piece.spoken)
        return self._up_to_character(piece.source_begin + round(len(source.rstrip()) * share))

    def _up_to_character(self, end: int) -> int:
        part = min(bisect_left(self._ends, end), len(self._ends) - 1)
        if part == 0:
            return 0
        begin, last = self._ends[part - 1 : part + 1]
        before, after = self._tokens[part - 1 : part + 1]
        share = (min(end, last) - begin) / (last - begin)
        return before + ceil(share * (after - before))
