"""Items of a conversation as records of a journal, and back.

Sounds and pictures are records of their own, because an item may change when these do not.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from sglang_live.core import (
    AudioPart,
    HistoryItem,
    ImagePart,
    Role,
    TextPart,
    TurnDone,
    Usage,
)
from sglang_live.gateway.audio.codec import FORMATS
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.items import (
    AudioContent,
    Content,
    FunctionCallItem,
    FunctionItem,
    ImageContent,
    Item,
    MessageItem,
    MessageRole,
    Status,
    TextContent,
)
from sglang_live.gateway.tools import FunctionCall
from sglang_live.sound.packed import PackedSound


class _Record(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """id: of the item."""

    id: str


class _Seen(msgspec.Struct, frozen=True, array_like=True):
    """A HistoryItem without audio."""

    key: str
    role: Role
    texts: tuple[str, ...]
    token_ids: tuple[int, ...] | None

    @staticmethod
    def of(item: HistoryItem | None) -> "_Seen | None":
        if item is None:
            return None
        texts = tuple(part.text for part in item.parts if isinstance(part, TextPart))
        return _Seen(item.key, item.role, texts, item.token_ids)

    def item(self) -> HistoryItem:
        parts = tuple(map(TextPart, self.texts))
        return HistoryItem(key=self.key, role=self.role, parts=parts, token_ids=self.token_ids)


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of an utterance. begin, end: of its stretch; None: it has a text, or nothing."""

    key: str
    opens: bool
    closes: bool
    text: str | None
    begin: int | None
    end: int | None

    @staticmethod
    def of(item: HistoryItem) -> "_Piece":
        text = begin = end = None
        for part in item.parts:
            if isinstance(part, TextPart):
                text = part.text
            elif isinstance(part, AudioPart):
                begin, end = part.begin, part.begin + part.n_samples
        return _Piece(item.key, item.opens, item.closes, text, begin, end)

    def item(self, role: Role, sound: AudioPart) -> HistoryItem:
        parts: tuple[TextPart | AudioPart, ...] = ()
        if self.text is not None:
            parts = (TextPart(self.text),)
        elif self.begin is not None:
            parts = (AudioPart(sound.sound, self.begin, self.end),)
        return HistoryItem(
            key=self.key, role=role, parts=parts, opens=self.opens, closes=self.closes
        )


class _Content(msgspec.Struct, frozen=True, array_like=True):
    """kind: of a text, or "audio" or "image". text: a sound's transcript, a picture's detail."""

    kind: Literal["input_text", "output_text", "audio", "image"]
    text: str | None


class _Message(_Record, frozen=True, tag="m"):
    """key: of the history item; None: it has none."""

    role: MessageRole
    content: tuple[_Content, ...]
    key: str | None
    is_silent: bool
    pieces: tuple[_Piece, ...] = ()


class _Function(_Record, frozen=True, tag="f"):
    kind: str
    fields: dict[str, str]
    seen: _Seen


class _Call(_Record, frozen=True, tag="c"):
    call_id: str
    name: str
    arguments: str
    turn_item: _Seen
    carried_by: str | None
    as_text: _Seen


class _End(msgspec.Struct, frozen=True, array_like=True):
    """What of a TurnDone an assistant item reads."""

    item: _Seen
    n_frames: int
    spoken: bool
    function_calls: tuple[str, ...]


class _Speech(_Record, frozen=True, tag="a"):
    modality: Literal["audio", "text"]
    form: str
    frames_per_token: float
    speed: float
    status: Status
    text: str
    made_bytes: int
    sent_bytes: int
    stopped: bool
    heard_ms: float | None
    truncated_ms: int | None
    marks: tuple[tuple[int, int], ...]
    spoken: tuple[tuple[int, float], ...]
    end: _End | None
    seen: _Seen | None


_decoder = msgspec.msgpack.Decoder(_Message | _Function | _Call | _Speech)
_encode = msgspec.msgpack.encode


class _Sound(msgspec.Struct, frozen=True, array_like=True):
    data: bytes
    n_samples: int
    digest: bytes


class _Picture(msgspec.Struct, frozen=True, array_like=True):
    png: bytes
    width: int
    height: int


def state_of(item: Item) -> tuple[Any, ...]:
    """What of the item's record may change, cheaply."""
    match item:
        case AssistantItem():
            key = item.history()
            return (
                *(item.status, len(item.text), item.made_bytes, item.sent_bytes, item.stopped),
                *(item.heard_ms, item.truncated_ms, key and key.key, item.end is not None),
            )
        case MessageItem():
            return item.is_silent, *(getattr(part, "transcript", None) for part in item.content)
    return ()


def record_of(item: Item) -> bytes:
    match item:
        case AssistantItem():
            return _encode(_speech_of(item))
        case MessageItem():
            seen = item.history()
            content = tuple(map(_content_of, item.content))
            several = item.pieces() if item.pieces() != (() if seen is None else (seen,)) else ()
            pieces = tuple(map(_Piece.of, several))
            key = None if seen is None else seen.key
            return _encode(_Message(item.id, item.role, content, key, item.is_silent, pieces))
        case FunctionItem():
            written = _Seen.of(item.history())
            assert written is not None, "it has a text"
            return _encode(_Function(item.id, item.kind, item.fields, written))
        case FunctionCallItem():
            turn_item, as_text = _Seen.of(item.turn_item), _Seen.of(item.as_text)
            assert item.call_id and turn_item and as_text
            carrier = item.carried_by.id if item.carried_by else None
            call = item.call
            return _encode(
                _Call(item.id, item.call_id, call.name, call.arguments, turn_item, carrier, as_text)
            )
    raise TypeError(f"no record for {type(item).__name__}")


def _content_of(part: Content) -> _Content:
    match part:
        case AudioContent():
            return _Content("audio", part.transcript)
        case ImageContent():
            return _Content("image", part.detail)
        case TextContent():
            return _Content(part.kind, part.text)


def media_of(item: Item) -> list[AudioPart | ImagePart]:
    """Sounds and pictures of its content, in order."""
    media: list[AudioPart | ImagePart] = []
    for part in item.content if isinstance(item, MessageItem) else ():
        if isinstance(part, AudioContent):
            media.append(part.audio)
        elif isinstance(part, ImageContent):
            media.append(part.image)
    return media


def medium_record(medium: AudioPart | ImagePart) -> bytes:
    """Takes milliseconds, in any thread."""
    if isinstance(medium, ImagePart):
        return _encode(_Picture(medium.png, medium.width, medium.height))
    sound = medium.packed().sound if medium.n_samples else PackedSound(b"", 0, b"")
    assert isinstance(sound, PackedSound)
    return _encode(_Sound(sound.data, sound.n_samples, sound.digest))


def items_of(
    records: Sequence[bytes | msgspec.Raw], medium: Callable[[str, int], bytes]
) -> list[Item]:
    """The items of these records, in order.

    Args:
        medium: record of a sound or picture, by its item's id and its number there.
    Raises:
        msgspec.DecodeError: one is not of this form.
    """
    items: dict[str, Item] = {}
    for data in records:
        record = _decoder.decode(data)
        items[record.id] = _item_of(record, medium, items)
    return list(items.values())


def _item_of(
    record: _Message | _Function | _Call | _Speech,
    medium: Callable[[str, int], bytes],
    items: Mapping[str, Item],
) -> Item:
    match record:
        case _Message():
            return _message_of(record, medium)
        case _Function():
            return FunctionItem(record.id, record.kind, record.fields, record.seen.item())
        case _Call():
            carrier = items.get(record.carried_by, _left()) if record.carried_by else None
            call = FunctionCallItem(
                FunctionCall(record.name, record.arguments), record.turn_item.item(), carrier
            )
            call.restore(record.id, record.call_id, record.as_text.item())
            return call
        case _Speech():
            return _assistant_of(record)


def _left() -> Item:
    """One that has left the conversation: the calls of its turn are in the history as text."""
    item = Item()
    item.has_left = True
    return item


def _message_of(record: _Message, medium: Callable[[str, int], bytes]) -> MessageItem:
    content: list[Content] = []
    n_media = 0
    for part in record.content:
        if part.kind in ("input_text", "output_text"):
            content.append(TextContent(part.kind, part.text or ""))
            continue
        data = medium(record.id, n_media)
        n_media += 1
        if part.kind == "audio":
            content.append(AudioContent(_audio_of(data), part.text))
        else:
            picture = msgspec.msgpack.decode(data, type=_Picture)
            image = ImagePart(picture.png, picture.width, picture.height)
            content.append(ImageContent(image, part.text or ""))
    audio = next((part.audio for part in content if isinstance(part, AudioContent)), None)
    pieces = tuple(piece.item(record.role, audio) for piece in record.pieces) if audio else ()
    item = MessageItem(record.id, record.role, content, pieces)
    item.restore(record.key, record.is_silent)
    return item


def _audio_of(data: bytes) -> AudioPart:
    sound = msgspec.msgpack.decode(data, type=_Sound)
    if not sound.n_samples:
        return AudioPart(np.zeros(0, np.int16))
    return AudioPart(PackedSound(sound.data, sound.n_samples, sound.digest))


def _speech_of(item: AssistantItem) -> _Speech:
    end = None
    if item.end is not None:
        seen = _Seen.of(item.end.item)
        assert seen is not None
        end = _End(seen, item.end.n_frames, item.end.spoken, item.end.function_calls)
    return _Speech(
        item.id,
        item.modality,
        item.audio_format.kind,
        item.frames_per_token,
        item.speed,
        item.status,
        item.text,
        item.made_bytes,
        item.sent_bytes,
        item.stopped,
        item.heard_ms,
        item.truncated_ms,
        tuple(item.marks),
        tuple(item.spoken),
        end,
        _Seen.of(item.history()),
    )


def _assistant_of(record: _Speech) -> AssistantItem:
    end = None
    if record.end is not None:
        end = TurnDone(
            status="completed",
            reason=None,
            item=record.end.item.item(),
            usage=Usage(),
            n_frames=record.end.n_frames,
            spoken=record.end.spoken,
            function_calls=record.end.function_calls,
        )
    return AssistantItem(
        record.id,
        record.modality,
        FORMATS[record.form],
        record.frames_per_token,
        record.speed,
        record.status,
        text=record.text,
        made_bytes=record.made_bytes,
        sent_bytes=record.sent_bytes,
        stopped=record.stopped,
        heard_ms=record.heard_ms,
        truncated_ms=record.truncated_ms,
        audio=None,
        marks=list(record.marks),
        spoken=list(record.spoken),
        end=end,
        _history=record.seen.item() if record.seen else None,
    )
