"""Conversation items: what the protocol shows of them and what the model sees of them.

Owner: the Conversation that holds the item. Only a reply changes, while it is being sent and
when it is truncated; every change of what the model sees gives the item a new history key.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sglang_live.gateway.audio_codec import PCM, WireFormat, encode_base64, encode_clip
from sglang_live.gateway.ids import new_id
from sglang_live.orchestrator.history import AudioPart, HistoryItem, TextPart

Status = Literal["in_progress", "completed", "incomplete"]

# With audio beyond this, base64 and envelope would pass the 1 MiB frame some clients allow.
MAX_RETRIEVED_AUDIO_BYTES = 700_000
# Words, or single characters of scripts that write without spaces (CJK, kana, Thai).
_WORD = re.compile(
    r"\s*(?:[\u0e00-\u0e7f\u2e80-\u9fff\uf900-\ufaff]|[^\s\u0e00-\u0e7f\u2e80-\u9fff]+)"
)


@dataclass(frozen=True, slots=True)
class TextContent:
    kind: Literal["input_text", "output_text"]
    text: str

    def to_wire(self, audio_format: WireFormat | None) -> dict[str, Any]:
        return {"type": self.kind, "text": self.text}

    def part(self) -> TextPart | None:
        return TextPart(self.text) if self.text else None

    @property
    def size_bytes(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True, eq=False)
class AudioContent:
    """pcm: [n] int16 at INPUT_RATE_HZ."""

    pcm: np.ndarray
    transcript: str | None = None

    def to_wire(self, audio_format: WireFormat | None) -> dict[str, Any]:
        shown: dict[str, Any] = {"type": "input_audio", "transcript": self.transcript}
        if audio_format:
            duration_ms = AudioPart(self.pcm).duration_s * 1000
            if audio_format.n_bytes(duration_ms) <= MAX_RETRIEVED_AUDIO_BYTES:
                shown["audio"] = encode_base64(encode_clip(self.pcm, audio_format))
        return shown

    def part(self) -> AudioPart | None:
        return AudioPart(self.pcm) if len(self.pcm) else None

    @property
    def size_bytes(self) -> int:
        return self.pcm.nbytes


class Item:
    """What all items have. `to_wire(audio_format)` includes audio only when given a format."""

    id: str

    def to_wire(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        raise NotImplementedError

    def history(self) -> HistoryItem | None:
        """The item as the model sees it, or None while there is nothing to see."""
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        raise NotImplementedError


class MessageItem(Item):
    """A message that came in whole."""

    def __init__(self, item_id: str, role: Literal["system", "user", "assistant"], content):
        self.id = item_id
        self.role = role
        self.content: tuple[TextContent | AudioContent, ...] = tuple(content)
        parts = tuple(part for part in (c.part() for c in self.content) if part)
        self._history = HistoryItem(key=new_id("key"), role=role, parts=parts) if parts else None

    def to_wire(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        content = [part.to_wire(audio_format) for part in self.content]
        return _wire(self, "message", "completed", role=self.role, content=content)

    def history(self) -> HistoryItem | None:
        return self._history

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.content)


class FunctionItem(Item):
    """A function_call or a function_call_output that the client wrote."""

    def __init__(self, item_id: str, kind: str, fields: dict[str, str], history: HistoryItem):
        self.id = item_id
        self._kind = kind
        self._fields = fields
        self._history = history

    def to_wire(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        return _wire(self, self._kind, "completed", **self._fields)

    def history(self) -> HistoryItem | None:
        return self._history

    @property
    def size_bytes(self) -> int:
        return sum(len(value) for value in self._fields.values())


@dataclass(eq=False)
class ReplyItem(Item):
    """A message of the assistant, filled by one response.

    text: everything sent, as text or as transcript of the audio.
    sent_bytes: audio sent, in audio_format.
    cut_ms: audio the caller heard, once the client truncated the item.
    audio: what was sent, for retrieval; None when it would not fit into one frame.
    """

    id: str
    modality: Literal["audio", "text"]
    audio_format: WireFormat = PCM
    status: Status = "in_progress"
    text: str = ""
    sent_bytes: int = 0
    cut_ms: int | None = None
    has_content: bool = False
    audio: bytearray | None = field(default_factory=bytearray)
    _generated: HistoryItem | None = None
    _history: HistoryItem | None = None

    @property
    def sent_ms(self) -> float:
        return self.audio_format.duration_ms(self.sent_bytes)

    @property
    def visible_text(self) -> str:
        """The text up to the cut."""
        if self.cut_ms is None or self.cut_ms >= self.sent_ms:
            return self.text
        return cut_at_word(self.text, self.cut_ms / self.sent_ms)

    def add_audio(self, frame: bytes) -> None:
        self.sent_bytes += len(frame)
        if self.audio is not None:
            self.audio += frame
            if len(self.audio) > MAX_RETRIEVED_AUDIO_BYTES:
                self.audio = None

    def close(self, status: Status, generated: HistoryItem | None) -> None:
        """No more will be sent. generated: what the model's session holds, if it finished."""
        self.status = status
        self._generated = generated
        self._remember()

    def truncate(self, audio_end_ms: int) -> None:
        """The caller heard audio_end_ms of it; the model shall not believe it said more."""
        # What was cut off once stays off.
        self.cut_ms = audio_end_ms if self.cut_ms is None else min(self.cut_ms, audio_end_ms)
        if self.status != "in_progress":
            self._remember()

    def history(self) -> HistoryItem | None:
        return self._history

    def part(self) -> dict[str, Any]:
        """The content part as response.content_part.* names it, which is not as items do."""
        if self.modality == "text":
            return {"type": "text", "text": self.visible_text}
        return {"type": "audio", "transcript": self.visible_text}

    def to_wire(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        content = [self._content(with_audio=audio_format is not None)] if self.has_content else []
        return _wire(self, "message", self.status, role="assistant", content=content)

    @property
    def size_bytes(self) -> int:
        return len(self.text) + len(self.audio or b"")

    def _content(self, *, with_audio: bool) -> dict[str, Any]:
        if self.modality == "text":
            return {"type": "output_text", "text": self.visible_text}
        shown: dict[str, Any] = {"type": "output_audio", "transcript": self.visible_text}
        if with_audio and self.audio is not None:
            heard = (
                len(self.audio) if self.cut_ms is None else self.audio_format.n_bytes(self.cut_ms)
            )
            shown["audio"] = encode_base64(bytes(self.audio[:heard]))
        return shown

    def _remember(self) -> None:
        text = self.visible_text
        if self._generated is not None and text == self.text:
            self._history = self._generated
        elif not text:
            self._history = None
        elif self._history is None or self._history.parts != (TextPart(text),):
            parts = (TextPart(text),)
            self._history = HistoryItem(key=new_id("key"), role="assistant", parts=parts)


def cut_at_word(text: str, ratio: float) -> str:
    """The first words of text that end within ratio (0..1) of its length."""
    limit = int(len(text) * ratio)
    end = 0
    for word in _WORD.finditer(text):
        if word.end() > limit:
            break
        end = word.end()
    return text[:end]


def _wire(item: Item, kind: str, status: str, **fields: Any) -> dict[str, Any]:
    return {"id": item.id, "object": "realtime.item", "type": kind, "status": status, **fields}
