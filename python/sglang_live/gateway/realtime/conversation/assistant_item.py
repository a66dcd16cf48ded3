"""A reply in the conversation: what was sent of it, what was heard of it, what the model sees.

Owner: the Conversation that holds the item; one response fills it. It changes while it is being
sent, when the turn says what it generated, and when it is cut. Every change of what the model
sees gives the item a new history key.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_live.core import FRAME_S, HistoryItem, TextPart, TurnDone
from sglang_live.gateway.audio.codec import PCM, WireFormat, encode_base64
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.realtime.conversation.items import (
    MAX_RETRIEVED_AUDIO_BYTES,
    Item,
    Status,
    item_to_wire,
)
from sglang_live.interaction.audio_alignment import PRIOR_FRAMES_PER_TOKEN, heard_tokens

_FRAME_MS = 1000 * FRAME_S
_ROUNDING_MS = 0.5
# Words, or single characters of scripts that write without spaces (CJK, kana, Thai).
# Not from within blanks: a reply that ends in thousands would be scanned from each of them.
_WORD = re.compile(
    r"(?<!\s)\s*(?:[\u0e00-\u0e7f\u2e80-\u9fff\uf900-\ufaff]|[^\s\u0e00-\u0e7f\u2e80-\u9fff]+)"
)


@dataclass(eq=False)
class AssistantItem(Item):
    """A message of the assistant.

    text: everything sent, as text or as transcript of the audio.
    made_bytes, sent_bytes: audio there is, and audio the network took, in audio_format.
    stopped: ended before it was complete; what was not sent was never said.
    heard_ms: what our own clock says was heard, once playback ended early.
    truncated_ms: what the client says, which counts for more; what it cut off once stays off.
    frames_per_token: pace to expect of audio that is not complete.
    audio: what was sent, for retrieval; None when it would not fit into one frame.
    """

    id: str
    modality: Literal["audio", "text"]
    audio_format: WireFormat = PCM
    frames_per_token: float = PRIOR_FRAMES_PER_TOKEN
    status: Status = "in_progress"
    text: str = field(default="", repr=False)  # nor anything else of what was said, in a log
    made_bytes: int = 0
    sent_bytes: int = 0
    stopped: bool = False
    heard_ms: float | None = None
    truncated_ms: int | None = None
    has_content: bool = False
    audio: bytearray | None = field(default_factory=bytearray, repr=False)
    _marks: list[tuple[int, int]] = field(default_factory=list)  # (tokens, characters of text)
    _end: TurnDone | None = field(default=None, repr=False)
    _history: HistoryItem | None = field(default=None, repr=False)

    @property
    def sent_ms(self) -> float:
        return self.audio_format.duration_ms(self.sent_bytes)

    @property
    def made_ms(self) -> float:
        return self.audio_format.duration_ms(self.made_bytes)

    @property
    def visible_text(self) -> str:
        """The text up to the cut."""
        tokens = self._tokens_kept()
        if tokens is not None:
            return self.text[: self._text_length(tokens)]
        end_ms = self._end_ms
        if end_ms is None or end_ms >= self.made_ms:
            return self.text
        return cut_at_word(self.text, end_ms / self.made_ms)

    def add_text(self, text: str, n_tokens: int) -> None:
        """n_tokens: tokens that all text so far stands for; 0 if that is not known."""
        self.text += text
        if n_tokens:
            self._marks.append((n_tokens, len(self.text)))

    def audio_sent(self, frame: bytes) -> None:
        self.sent_bytes += len(frame)
        if self.audio is not None:
            self.audio += frame
            if len(self.audio) > MAX_RETRIEVED_AUDIO_BYTES:
                self.audio = None

    def close(self, status: Status, *, stopped: bool = False) -> None:
        """No more will be sent than is on its way."""
        self.status, self.stopped = status, stopped
        self._remember()

    def learn(self, end: TurnDone) -> None:
        """The turn has ended: what the model's session holds now."""
        self._end = end
        self._remember()

    def hear(self, heard_ms: float) -> bool:
        """Playback ended early, after heard_ms. Returns whether that leaves less of the item."""
        text, end_ms = self.visible_text, self.made_ms if self._end_ms is None else self._end_ms
        # Sums of durations are not exact; the end must be recognised as the end.
        self.heard_ms = self.made_ms if heard_ms > self.made_ms - _ROUNDING_MS else heard_ms
        self._remember()
        return self.truncated_ms is None and (self.heard_ms < end_ms or self.visible_text != text)

    def truncate(self, audio_end_ms: int) -> None:
        """The caller heard audio_end_ms of it; the model shall not believe it said more."""
        self.truncated_ms = (
            audio_end_ms if self.truncated_ms is None else min(self.truncated_ms, audio_end_ms)
        )
        self._remember()

    def history(self) -> HistoryItem | None:
        return self._history

    def part(self) -> dict[str, Any]:
        """The content part as response.content_part.* names it, which is not as items do."""
        if self.modality == "text":
            return {"type": "text", "text": self.visible_text}
        return {"type": "audio", "transcript": self.visible_text}

    def to_json(self, audio_format: WireFormat | None = None) -> dict[str, Any]:
        content = [self._content(with_audio=audio_format is not None)] if self.has_content else []
        return item_to_wire(self, "message", self.status, role="assistant", content=content)

    @property
    def size_bytes(self) -> int:
        return len(self.text) + len(self.audio or b"")

    @property
    def _end_ms(self) -> float | None:
        """Where the item was cut, by the best evidence there is."""
        return self.heard_ms if self.truncated_ms is None else self.truncated_ms

    def _tokens_kept(self) -> int | None:
        """How many tokens of the reply the model said; None if only its text is known."""
        ids = self._end.item.token_ids if self._end else None
        if not ids or not self._marks:
            return None
        if self.modality == "text":
            return min(len(ids), self._marks[-1][0]) if self.stopped else len(ids)
        end_ms = self._end_ms
        if not self.stopped and (end_ms is None or end_ms >= self.made_ms):
            return len(ids)
        # Without a word of what was heard, what was sent counts.
        end_ms = self.sent_ms if end_ms is None else min(end_ms, self.sent_ms)
        n_frames = self._end.n_frames or (0 if self.stopped else round(self.made_ms / _FRAME_MS))
        return heard_tokens(
            end_ms / 1000,
            n_tokens=self._marks[-1][0]
            if self._end.function_calls
            else len(ids),  # calls are not spoken
            n_frames=n_frames,
            spoken=self._end.spoken,
            frames_per_token=self.frames_per_token,
        )

    def _text_length(self, n_tokens: int) -> int:
        """Characters that n_tokens stand for; a character may take several tokens."""
        if n_tokens >= self._marks[-1][0]:
            return len(self.text)
        return max((length for tokens, length in self._marks if tokens <= n_tokens), default=0)

    def _content(self, *, with_audio: bool) -> dict[str, Any]:
        if self.modality == "text":
            return {"type": "output_text", "text": self.visible_text}
        shown: dict[str, Any] = {"type": "output_audio", "transcript": self.visible_text}
        if with_audio and self.audio is not None:
            end_ms = self._end_ms
            n_bytes = len(self.audio) if end_ms is None else self.audio_format.n_bytes(end_ms)
            shown["audio"] = encode_base64(bytes(self.audio[:n_bytes]))
        return shown

    def _remember(self) -> None:
        """Work out the history item anew; an equal one keeps its key."""
        if self.status == "in_progress":
            return
        text, tokens = self.visible_text, self._tokens_kept()
        reply = self._end.item if self._end else None
        if tokens is None:
            if reply and text == self.text and not self.stopped:
                self._history = reply
            else:
                self._keep(text, None)
        elif tokens >= len(reply.token_ids):
            self._history = reply
        else:
            self._keep(text, reply.token_ids[:tokens])

    def _keep(self, text: str, ids: tuple[int, ...] | None) -> None:
        parts = (TextPart(text),) if text else ()
        known = self._history
        if not (text if ids is None else ids):
            self._history = None
        elif known is None or (known.parts, known.token_ids) != (parts, ids):
            self._history = HistoryItem(
                key=new_id("key"), role="assistant", parts=parts, token_ids=ids
            )


def cut_at_word(text: str, ratio: float) -> str:
    """The first words of text that end within ratio (0..1) of its length."""
    limit = int(len(text) * ratio)
    end = 0
    for word in _WORD.finditer(text):
        if word.end() > limit:
            break
        end = word.end()
    return text[:end]
