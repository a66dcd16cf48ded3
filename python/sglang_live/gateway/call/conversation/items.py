"""Conversation items, and their form in the model's history.

Owner: the Conversation that holds the item. Only assistant items change (assistant_item.py).
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sglang_live.core import AudioPart, HistoryItem, ImagePart, TextPart
from sglang_live.gateway.tools import FunctionCall
from sglang_live.ids import new_id
from sglang_live.sound.packed import Samples

Status = Literal["in_progress", "completed", "incomplete"]
MessageRole = Literal["system", "user", "assistant"]
TextKind = Literal["input_text", "output_text"]


@dataclass(frozen=True, slots=True)
class TextContent:
    kind: TextKind
    text: str

    def part(self) -> TextPart | None:
        return TextPart(self.text) if self.text else None

    @property
    def size_bytes(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True, eq=False)
class AudioContent:
    audio: AudioPart
    transcript: str | None = None

    def part(self) -> AudioPart | None:
        return self.audio if self.audio.n_samples else None

    @property
    def size_bytes(self) -> int:
        return self.audio.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class ImageContent:
    """detail: as the client asked for it."""

    image: ImagePart
    detail: str

    def part(self) -> ImagePart:
        return self.image

    @property
    def size_bytes(self) -> int:
        return self.image.size_bytes


Content = TextContent | AudioContent | ImageContent


class Item:
    """Base of all items.

    call_id: id of a function call; None for other items.
    answers: id of the call of a function call's output; None for other items.
    has_left: whether the item has left the conversation.
    """

    id: str
    call_id: str | None = None
    answers: str | None = None
    has_left: bool = False

    def history(self) -> HistoryItem | None:
        """The item in the model's history, or None if it has no content."""
        raise NotImplementedError

    def pieces(self) -> tuple[HistoryItem, ...]:
        """The history items of this item in the model's session: several after a turn prefill."""
        history = self.history()
        return () if history is None else (history,)

    @property
    def size_bytes(self) -> int:
        raise NotImplementedError

    @property
    def has_sound(self) -> bool:
        """Whether the item has sounds that are not packed."""
        return False

    @property
    def is_raw(self) -> bool:
        """Whether these are complete."""
        return self.has_sound

    def raw_sounds(self) -> list[AudioPart]:
        """These sounds."""
        return []

    def keep_packed(self, sounds: Sequence[AudioPart]) -> None:
        """Keep these in the place of raw_sounds()."""
        assert not sounds


class MessageItem(Item):
    """A message that is complete from the beginning.

    pieces: history items of a turn prefill, with consecutive stretches of the audio; empty without
        one.
    is_speech: returns whether audio, [n] int16, has speech, for judge(); None: it has.
    is_silent: judge() found no speech. The client has the item, the model's history has not.
    """

    def __init__(
        self,
        item_id: str,
        role: MessageRole,
        content: Iterable[Content],
        pieces: tuple[HistoryItem, ...] = (),
        is_speech: Callable[[Samples], bool] | None = None,
    ):
        self.id = item_id
        self._is_speech = is_speech
        self.is_silent = False
        self.role = role
        self.content: tuple[Content, ...] = tuple(content)
        parts = tuple(part for part in (c.part() for c in self.content) if part)
        self._history = HistoryItem(key=new_id("key"), role=role, parts=parts) if parts else None
        self._pieces = _stretches_of(self._audio[0], pieces) if pieces else ()

    def history(self) -> HistoryItem | None:
        return self._history

    def pieces(self) -> tuple[HistoryItem, ...]:
        return self._pieces or super().pieces()

    def restore(self, key: str | None, is_silent: bool) -> None:
        """Of an item of another gateway. key: of its history item."""
        self.is_silent = is_silent
        if key is None:
            self._history, self._pieces = None, ()
        elif self._history is not None:
            self._history = replace(self._history, key=key)

    @property
    def is_unjudged(self) -> bool:
        return self._is_speech is not None

    def judge(self) -> None:
        """Determine whether the audio has speech; takes milliseconds the first time."""
        if self._is_speech is not None and not self._is_speech(self._audio[0].pcm):
            self.is_silent = True
            self._history = None
            self._pieces = ()
        self._is_speech = None

    def transcribed(self, text: str) -> None:
        """Set the transcript of the audio. The model's history keeps the audio."""
        self.content = tuple(
            replace(part, transcript=text) if isinstance(part, AudioContent) else part
            for part in self.content
        )

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.content)

    @property
    def _audio(self) -> list[AudioPart]:
        return [part.audio for part in self.content if isinstance(part, AudioContent)]

    @property
    def _raw(self) -> list[AudioPart]:
        return [part for part in self._audio if part.n_samples and not part.is_packed]

    @property
    def has_sound(self) -> bool:
        return bool(self._raw)

    @property
    def is_raw(self) -> bool:
        return self.has_sound and not self.is_unjudged  # judge() runs in a thread

    def raw_sounds(self) -> list[AudioPart]:
        return self._raw

    def keep_packed(self, sounds: Sequence[AudioPart]) -> None:
        packed = dict(zip(self._raw, sounds, strict=True))
        self.content = tuple(
            replace(part, audio=packed.get(part.audio, part.audio))
            if isinstance(part, AudioContent)
            else part
            for part in self.content
        )
        if self._history is not None:
            self._history = self._history.with_audio(lambda part: packed.get(part, part))
        if self._pieces:
            self._pieces = _stretches_of(self._audio[0], self._pieces)


def _stretches_of(audio: AudioPart, pieces: tuple[HistoryItem, ...]) -> tuple[HistoryItem, ...]:
    """The pieces with stretches of this audio, so that it is kept once."""
    end = 0

    def stretch(part: AudioPart) -> AudioPart:
        nonlocal end
        begin, end = end, end + part.n_samples
        return AudioPart(audio.sound, begin, end)

    return tuple(piece.with_audio(stretch) for piece in pieces)


def call_as_text(name: str, arguments: str) -> HistoryItem:
    """A function call as text, in the form that models of the Hermes family (Qwen) write, so that
    it looks like their own."""
    written = "{}" if arguments in ("", "null") else arguments
    call = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}}}'
    text = f"<tool_call>\n{call}\n</tool_call>"
    return HistoryItem(key=new_id("key"), role="assistant", parts=(TextPart(text),))


class FunctionItem(Item):
    """A function_call or a function_call_output that the client wrote.

    fields: of the protocol: call_id, and name and arguments, or output.
    """

    def __init__(self, item_id: str, kind: str, fields: dict[str, str], history: HistoryItem):
        self.id = item_id
        self.kind = kind
        self.fields = fields
        if kind == "function_call":
            self.call_id = fields["call_id"]
        else:
            self.answers = fields["call_id"]
        self._history = history

    def history(self) -> HistoryItem | None:
        return self._history

    @property
    def size_bytes(self) -> int:
        return sum(len(value) for value in self.fields.values())


@dataclass(eq=False)
class FunctionCallItem(Item):
    """Function call of the model.

    Text and function calls of a turn are several items but one history item: the first of the items
    represents it, the others have no history. If the first one was truncated or deleted, a function
    call is in the history as text of its own.

    turn_item: history item of the whole turn.
    carried_by: item that represents it; None: this one.
    as_text: the call by itself.
    """

    call: FunctionCall
    turn_item: HistoryItem
    carried_by: Item | None

    def __post_init__(self) -> None:
        self.id = new_id("item")
        self.call_id = new_id("call")
        self.as_text = call_as_text(self.call.name, self.call.arguments)

    def restore(self, item_id: str, call_id: str, as_text: HistoryItem) -> None:
        """Of an item of another gateway."""
        self.id, self.call_id, self.as_text = item_id, call_id, as_text

    def history(self) -> HistoryItem | None:
        if self.carried_by is None:
            return self.turn_item
        carried = None if self.carried_by.has_left else self.carried_by.history()
        is_whole = carried is not None and carried.token_ids == self.turn_item.token_ids
        return None if is_whole else self.as_text

    @property
    def size_bytes(self) -> int:
        return len(self.call.name) + len(self.call.arguments)
