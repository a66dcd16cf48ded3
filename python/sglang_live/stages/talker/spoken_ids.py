"""A response's text as the ids of what is said of it, for a talker that reads text.

In: the text of any language model, as it grows. Out: ids of the talker's own vocabulary. What is
not spoken, such as markdown, code and emoji, does not reach the talker (speakable/).
Owner: one SpokenIds per response.
"""

from sglang_live.messages import TalkerInput
from sglang_live.models.family import TextReader
from sglang_live.speakable.pieces import Limits, Pieces

# A talker reads one token per frame, several times as fast as it speaks: it needs the next words
# before a sentence is complete. Figures and marks need the words beside them.
_LIMITS = Limits(first_words=2, first_most=6, enough=20, much=60, longest=120)


class SpokenIds:
    def __init__(self, reader: TextReader):
        self._encode = reader.encode
        self._pieces = Pieces(reader.style, _LIMITS)
        self._has_begun = False

    @property
    def n_unspeakable(self) -> int:
        """Letters that the talker cannot speak, and that were left out."""
        return self._pieces.n_unspeakable

    def add(self, part: TalkerInput) -> list[int]:
        """The ids that are certain with this part of the response."""
        pieces = self._pieces.add(part.text)
        if part.done:
            pieces += self._pieces.end()
        return [token for piece in pieces if piece.spoken for token in self._ids(piece.spoken)]

    def _ids(self, words: str) -> list[int]:
        # Tokenizers join a space with the word behind it: pieces then give the ids of the whole.
        text = f" {words}" if self._has_begun else words
        self._has_begun = True
        return self._encode(text)
