"""Qwen3-Omni's ChatML: the thinker's prompt in pieces that can be appended.

A piece ends at a special token, so tokenising piece by piece gives the same ids as tokenising the
whole. Text of users never becomes special tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.models.qwen3_omni.spec import Qwen3OmniSpec
from sglang_live.models.qwen3_omni.tool_prompt import (
    CALL_BEGIN,
    instructions_with,
    opening_of,
)


class Tokenizer(Protocol):
    def encode(self, text: str, **kwargs) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Markup:
    """ChatML of this module; may have special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """Token ids of users' text or of an assistant item; never special tokens of Markup."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """One clip of audio, with its placeholder.

    Attributes:
        begins: whether the audio span begins with this clip.
        ends: whether the audio span ends with this clip.
    """

    audio: AudioPart
    begins: bool = True
    ends: bool = True

    @property
    def markup(self) -> str:
        begin = "<|audio_start|>" if self.begins else ""
        return f"{begin}<|audio_pad|>{'<|audio_end|>' if self.ends else ''}"


Piece = Markup | Words | Clip


@dataclass(frozen=True, slots=True)
class Opening:
    """The first tokens of a response, which the model does not choose."""

    token_ids: tuple[int, ...] = ()
    text: str = ""


NO_OPENING = Opening()


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """The prompt of one request: ids, or markup around one clip (the processor makes the ids)."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    clip: AudioPart | None = None


class ChatPrompt:
    def __init__(self, spec: Qwen3OmniSpec, tokenizer: Tokenizer):
        self._spec = spec
        self._tokenizer = tokenizer
        self.newline_id = self.markup_ids("\n")[0]

    def header(self, instructions: str) -> list[Piece]:
        """The beginning of a session, which sessions with the same instructions share, and which
        is their attention sink.
        """
        if not instructions:
            # An empty prefill is impossible, and every history begins with this token.
            return [Markup("<|im_start|>")]
        return [
            Markup("<|im_start|>"),
            self._words(f"system\n{instructions}"),
            Markup("<|im_end|>\n<|im_start|>"),
        ]

    def item(self, item: HistoryItem) -> list[Piece]:
        """One message. Its leading `<|im_start|>` is the end of the pieces before."""
        return [*self._body(item), *([Markup("<|im_end|>\n<|im_start|>")] if item.closes else [])]

    def open_response(self) -> list[Piece]:
        """The beginning of the assistant's message."""
        return [Markup("assistant\n")]

    def with_functions(self, instructions: str, functions: list[str]) -> str:
        """Instructions with a description of functions, each as JSON text."""
        return instructions_with(self._tokenizer, instructions, functions)

    def opening(self, must_call: str | None) -> Opening:
        """The forced beginning of a response.

        Args:
            must_call: see Tools.
        """
        if must_call is None:
            return NO_OPENING
        text = opening_of(must_call)
        return Opening(tuple(self.markup_ids(text)), text)

    def call_begin_id(self) -> int | None:
        """The token that begins a function call; None if it is several tokens."""
        ids = self.markup_ids(CALL_BEGIN)
        return ids[0] if len(ids) == 1 else None

    def close_response(self, *, model_wrote_end: bool) -> list[Piece]:
        """The pieces between a response and the next item."""
        return [Markup("\n<|im_start|>" if model_wrote_end else "<|im_end|>\n<|im_start|>")]

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
                out.append(Append(text=markup, clip=clip))
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
                markup, clip = markup + piece.markup, piece.audio
        flush()
        if ids:
            out.append(Append(token_ids=tuple(ids)))
        return out

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

    def n_places(self, append: Append, n_new: int) -> int:
        """Placeholders of an append with a clip that added n_new tokens in all."""
        return n_new - (len(self.markup_ids(append.text)) - 1)

    def segment_ids(self, item: HistoryItem, n_places: list[int]) -> list[int]:
        """One user message as the talker reads it, placeholders expanded to n_places each."""
        places = iter(n_places)
        ids: list[int] = []
        begin = [Markup("<|im_start|>")] if item.opens else []
        end = [Markup("<|im_end|>\n")] if item.closes else []
        for piece in (*begin, *self._body(item), *end):
            match piece:
                case Markup():
                    ids += self.markup_ids(piece.text)
                case Words():
                    ids += piece.token_ids
                case Clip():
                    for token_id in self.markup_ids(piece.markup):
                        n = next(places) if token_id == self._spec.audio_pad_id else 1
                        ids += [token_id] * n
        return ids

    def _body(self, item: HistoryItem) -> list[Piece]:
        """Role and content of a message, or of a piece of one."""
        if not (item.opens and item.closes):
            [audio] = item.parts
            assert isinstance(audio, AudioPart)  # only speech is split into several items
            clip = Clip(audio, begins=item.opens, ends=item.closes)
            return [Markup(f"{item.role}\n"), clip] if item.opens else [clip]
        role = Markup(f"{'user' if item.role == 'tool' else item.role}\n")
        if item.token_ids is not None:
            return [role, Words(item.token_ids)]
        pieces: list[Piece] = [role]
        for _, group in groupby(item.parts, key=type):
            parts = list(group)
            clips = [Clip(part) for part in parts if isinstance(part, AudioPart)]
            text = "".join(part.text for part in parts if isinstance(part, TextPart))
            pieces += clips
            if text:
                # A token may span two texts, or the role's newline and the text after it.
                if pieces == [role]:
                    pieces = [self._words(role.text + text)]
                else:
                    pieces.append(self._words(text))
        return pieces

    def words(self, text: str) -> list[int]:
        """Token ids of users' text; never special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def _words(self, text: str) -> Words:
        return Words(tuple(self.words(text)))

    def markup_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
