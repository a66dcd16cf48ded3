"""The thinker's prompt in pieces that can be appended to an engine session.

A piece ends at a special token, so tokenising piece by piece gives the same ids as tokenising the
whole. Text of users never becomes special tokens. A model family derives its prompt from
PiecewisePrompt.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_live.core import HistoryItem, Medium
from sglang_live.models.stand_ins import instead_of_descriptions
from sglang_live.models.tool_prompt import CALL_BEGIN, instructions_with, opening_of
from sglang_live.speakable.style import SpeechStyle


class Tokenizer(Protocol):
    def encode(self, text: str, **kwargs) -> list[int]: ...

    def decode(self, token_ids: list[int], **kwargs) -> str: ...


@dataclass(frozen=True, slots=True)
class Markup:
    """Text of the family's own; may have special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """Token ids of users' text or of an assistant item; never special tokens of Markup."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """One clip of audio, or a picture. markup: its placeholder, one token, and what is around."""

    medium: Medium
    markup: str


Piece = Markup | Words | Clip


@dataclass(frozen=True, slots=True)
class Opening:
    """The first tokens of a response, which the model does not choose, or has chosen elsewhere.

    tail: the last of them that have no text yet: they hold parts of a character.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    tail: tuple[int, ...] = ()


NO_OPENING = Opening()
# Tokens at the end of a response that have no text until the next one comes, at most.
_MOST_TAIL = 8


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """The prompt of one request: ids, or text around clips (the processor makes the ids)."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    clips: tuple[Medium, ...] = ()


class PiecewisePrompt(ABC):
    """
    Args:
        end_ids: tokens that end a response.
        system: markup before and after the content of a system message in the tokenizer's chat
            template, where it describes functions.

    Attributes:
        gives_up: how responses begin to what a model does not understand that has not learnt to
            call functions (stand_ins.py); "": it has.
        stands_for: the one function that such a response calls; "": the first that takes words.
    """

    gives_up, stands_for = "", ""

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int], system: tuple[str, str]):
        self._tokenizer = tokenizer
        self._system = system
        self.end_ids = tuple(dict.fromkeys(end_ids))

    # --- what a family writes ---

    @abstractmethod
    def header(self, instructions: str) -> list[Piece]:
        """The beginning of a session, which sessions with the same instructions share, and which
        is their attention sink. At least one token.
        """

    @abstractmethod
    def item(self, item: HistoryItem) -> list[Piece]:
        """One message, or a piece of an utterance."""

    @abstractmethod
    def open_response(self) -> list[Piece]:
        """The beginning of the assistant's message: markup alone."""

    @abstractmethod
    def close_response(self, *, model_wrote_end: bool) -> list[Piece]:
        """The pieces between a response and the next item."""

    # --- functions ---

    def with_functions(self, instructions: str, functions: list[str]) -> str:
        """Instructions with a description of functions, each as JSON text."""
        if self.gives_up:
            instructions, functions = instead_of_descriptions(
                instructions, functions, self.stands_for
            )
        return instructions_with(self._tokenizer, instructions, functions, self._system)

    def opening(self, must_call: str | None) -> Opening:
        """The forced beginning of a response.

        Args:
            must_call: see Tools.
        """
        if must_call is None:
            return NO_OPENING
        text = opening_of(must_call)
        return Opening(tuple(self.markup_ids(text)), text)

    def continued(self, token_ids: Sequence[int], text: str) -> Opening:
        """A response that goes on behind these tokens.

        text: of them, as far as it was known.
        """
        n = len(token_ids)
        for n_tail in range(min(n, _MOST_TAIL) + 1):
            if self._tokenizer.decode(list(token_ids[: n - n_tail])).strip() == text.strip():
                return Opening(tuple(token_ids), text, tuple(token_ids[n - n_tail :]))
        return Opening(tuple(token_ids), "", tuple(token_ids))

    def text_behind(self, opening: Opening, token_ids: Sequence[int], text: str) -> str:
        """The text of a response: of its opening, and of the tokens behind it with their text."""
        if not opening.tail:
            return opening.text + text
        ids = [token for token in token_ids if token not in self.end_ids]
        return opening.text + self._tokenizer.decode([*opening.tail, *ids])

    def call_begin_id(self) -> int | None:
        """The token that begins a function call; None if it is several tokens."""
        ids = self.markup_ids(CALL_BEGIN)
        return ids[0] if len(ids) == 1 else None

    # --- requests ---

    def appends(self, pieces: list[Piece]) -> list[Append]:
        """Join pieces into as few requests as possible: at most one clip each."""
        out: list[Append] = []
        ids: list[int] = []
        markup, clip = "", None  # markup not yet tokenised, perhaps around a clip

        def flush() -> None:
            nonlocal markup, clip
            if clip is not None:
                if ids:
                    out.append(Append(token_ids=tuple(ids)))
                    ids.clear()
                out.append(Append(text=markup, clips=(clip,)))
            elif markup:
                ids.extend(self.markup_ids(markup))
            markup, clip = "", None

        for piece in pieces:
            if isinstance(piece, Markup):
                markup += piece.text
            elif isinstance(piece, Words):
                flush()
                ids.extend(piece.token_ids)
            else:
                if clip is not None:
                    flush()
                markup, clip = markup + piece.markup, piece.medium
        flush()
        if ids:
            out.append(Append(token_ids=tuple(ids)))
        return out

    def as_one(self, pieces: list[Piece]) -> Append | None:
        """One request with any number of clips. None: as text it has other tokens than in several
        requests, such as where words look like markup.
        """
        appends = self.appends(pieces)
        clips = tuple(clip for append in appends for clip in append.clips)
        ids = [id for a in appends for id in (a.token_ids or self.markup_ids(a.text))]
        if not clips:
            return Append(token_ids=tuple(ids))
        words = [list(piece.token_ids) for piece in pieces if isinstance(piece, Words)]
        if any(self.words(self._tokenizer.decode(said)) != said for said in words):
            return None
        text = "".join(a.text or self._tokenizer.decode(list(a.token_ids)) for a in appends)
        return Append(text=text, clips=clips) if self.markup_ids(text) == ids else None

    def n_tokens(self, pieces: list[Piece], n_places: Iterator[int]) -> int:
        """Tokens that `pieces` add to a session.

        Args:
            n_places: placeholders of each clip, in order.
        """
        n = 0
        for piece in pieces:
            match piece:
                case Markup():
                    n += len(self.markup_ids(piece.text))
                case Words():
                    n += len(piece.token_ids)
                case Clip():
                    n += len(self.markup_ids(piece.markup)) - 1 + next(n_places)
        return n

    def media(self, item: HistoryItem) -> list[Medium]:
        """What of the item is no text, in order, one for each clip of its pieces."""
        return [piece.medium for piece in self.item(item) if isinstance(piece, Clip)]

    def n_places(self, append: Append, n_new: int) -> int:
        """Placeholders of an append with a clip that added n_new tokens in all."""
        return n_new - (len(self.markup_ids(append.text)) - 1)

    # --- ids ---

    def words(self, text: str) -> list[int]:
        """Token ids of users' text; never special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def text_of(self, token_ids: list[int]) -> str:
        """The text of a response's ids, without control tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def markup_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _words(self, text: str) -> Words:
        return Words(tuple(self.words(text)))


class TalkerReadPrompt(PiecewisePrompt):
    """A prompt whose user messages a talker reads, too.

    script_style: of texts that it speaks word for word (speakable/pieces.py).
    placeholders: tokens that stand for audio or a picture.
    """

    script_style: SpeechStyle | None = None
    placeholders: frozenset[int]

    @abstractmethod
    def segment_ids(self, item: HistoryItem, n_places: list[int]) -> list[int]:
        """One user message as the talker reads it, placeholders expanded to n_places each."""
