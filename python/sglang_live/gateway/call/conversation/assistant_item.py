"""Assistant item: its sent audio and text, the part that was heard, the part that the model sees.

Owner: the Conversation that holds the item; one response fills it. It changes while it is sent,
when its turn ends, and when it is truncated. Every change of the part that the model sees gives
the item a new history key.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sglang_live.core import FRAME_S, AudioPart, HistoryItem, TextPart, TurnDone
from sglang_live.gateway.audio.codec import PCM, WireFormat
from sglang_live.gateway.call.conversation.items import Item, Status
from sglang_live.ids import new_id
from sglang_live.interaction.playback import PRIOR_FRAMES_PER_TOKEN, heard_tokens
from sglang_live.sound.packed import PackedSound

# With more audio, base64 and envelope exceed 1 MiB, the limit of a frame in some clients.
MAX_RETRIEVED_AUDIO_BYTES = 700_000
_FRAME_MS = 1000 * FRAME_S
# Of English text.
_CHARACTERS_PER_TOKEN = 4
_ROUNDING_MS = 0.5
# Words, or single characters of scripts without spaces (CJK, kana, Thai). A match does not start
# within blanks: a text that ends in thousands of them would be scanned from each one.
_WORD = re.compile(
    r"(?<!\s)\s*(?:[\u0e00-\u0e7f\u2e80-\u9fff\uf900-\ufaff]|[^\s\u0e00-\u0e7f\u2e80-\u9fff]+)"
)


@dataclass(eq=False)
class AssistantItem(Item):
    """A message of the assistant.

    text: all text so far, of the message or of its audio's transcript.
    made_bytes: audio that exists, in audio_format.
    sent_bytes: audio that the network has taken, in audio_format.
    stopped: the response ended before it was complete; unsent audio does not count as spoken.
    heard_ms: end of the heard audio by the playback clock; None: playback did not end early.
    truncated_ms: end of the heard audio by the client, which takes precedence and never grows;
        None: the client has not truncated the item.
    frames_per_token: expected pace of incomplete audio.
    speed: seconds of speech, as the stages make it, in a second of audio. Tokens belong to speech.
    audio: sent audio, for retrieval, packed once it is complete and no longer the newest; None if
        it does not fit into one frame.
    marks: (tokens, characters of text), as the text came. spoken: see AudioDelta.
    end: what the model's session holds; None: the turn has not ended.
    """

    id: str
    modality: Literal["audio", "text"]
    audio_format: WireFormat = PCM
    frames_per_token: float = PRIOR_FRAMES_PER_TOKEN
    speed: float = 1.0
    status: Status = "in_progress"
    text: str = field(default="", repr=False)  # no words of a conversation in a log
    made_bytes: int = 0
    sent_bytes: int = 0
    stopped: bool = False
    heard_ms: float | None = None
    truncated_ms: int | None = None
    audio: bytearray | PackedSound | None = field(default_factory=bytearray, repr=False)
    marks: list[tuple[int, int]] = field(default_factory=list)
    spoken: list[tuple[int, float]] = field(default_factory=list)
    end: TurnDone | None = field(default=None, repr=False)
    _history: HistoryItem | None = field(default=None, repr=False)

    @property
    def sent_ms(self) -> float:
        return self.audio_format.duration_ms(self.sent_bytes)

    @property
    def made_ms(self) -> float:
        return self.audio_format.duration_ms(self.made_bytes)

    @property
    def visible_text(self) -> str:
        """The text up to the end of the heard audio."""
        tokens = self._tokens_kept()
        if tokens is not None:
            return self.text[: self._text_length(tokens)]
        end_ms = self._end_ms
        if end_ms is None or end_ms >= self.made_ms:
            return self.text
        return truncate_at_word(self.text, end_ms / self.made_ms)

    def said_by(self, until_ms: float) -> str:
        """The text whose audio ends within the first until_ms of audio, as far as it is known."""
        if self.spoken:
            return self.text[: self._text_length(self._tokens_spoken(until_ms))]
        if self.marks:
            n_tokens = heard_tokens(
                until_ms * self.speed / 1000,
                n_tokens=self.marks[-1][0],
                n_frames=self.end.n_frames if self.end else 0,
                spoken=self.end is not None and self.end.spoken,
                frames_per_token=self.frames_per_token,
            )
            return self.text[: self._text_length(n_tokens)]
        n_tokens = int(until_ms * self.speed / _FRAME_MS / self.frames_per_token)
        n_characters = min(n_tokens * _CHARACTERS_PER_TOKEN, len(self.text))
        return truncate_at_word(self.text, n_characters / max(len(self.text), 1))

    def add_text(self, text: str, n_tokens: int) -> None:
        """n_tokens: number of tokens of all text so far; 0 if it is unknown."""
        self.text += text
        if n_tokens:
            self.marks.append((n_tokens, len(self.text)))

    def add_spoken(self, spoken: Iterable[tuple[int, float]]) -> None:
        """spoken: see AudioDelta."""
        self.spoken += spoken

    def audio_sent(self, frame: bytes) -> None:
        self.sent_bytes += len(frame)
        if isinstance(self.audio, PackedSound):
            self.audio = bytearray(self._sent_audio())
        if self.audio is not None:
            self.audio += frame
            if len(self.audio) > MAX_RETRIEVED_AUDIO_BYTES:
                self.audio = None

    def begin_again(self, text: str, n_tokens: int) -> None:
        """Another gateway has made this text of it; its audio comes from the beginning."""
        self.status, self.stopped, self.end, self._history = "in_progress", False, None, None
        self.heard_ms = None
        self.made_bytes = self.sent_bytes = 0
        self.audio = bytearray()
        self.marks = [(n, end) for n, end in self.marks if n < n_tokens and end < len(text)]
        self.spoken = []
        self.text = ""
        self.add_text(text, n_tokens)

    def close(self, status: Status, *, stopped: bool = False) -> None:
        """End the item. Nothing is sent any more except events that are already queued."""
        self.status = status
        self.stopped = stopped
        self._update_history()

    def set_end(self, end: TurnDone) -> None:
        """Set the end of the turn, which has what the model's session holds now."""
        self.end = end
        self._update_history()

    def end_playback(self, heard_ms: float) -> bool:
        """End the playback early, after heard_ms. Returns whether the item becomes shorter."""
        text, end_ms = self.visible_text, self.made_ms if self._end_ms is None else self._end_ms
        # Sums of durations are not exact; the end must still count as the end.
        self.heard_ms = self.made_ms if heard_ms > self.made_ms - _ROUNDING_MS else heard_ms
        self._update_history()
        return self.truncated_ms is None and (self.heard_ms < end_ms or self.visible_text != text)

    def truncate(self, audio_end_ms: int) -> None:
        """Drop the audio after audio_end_ms, which the user did not hear, from the item."""
        self.truncated_ms = (
            audio_end_ms if self.truncated_ms is None else min(self.truncated_ms, audio_end_ms)
        )
        self._update_history()

    def history(self) -> HistoryItem | None:
        return self._history

    @property
    def heard_audio(self) -> bytes | None:
        """Sent audio up to the end of the heard part; None if it was not kept."""
        if self.audio is None:
            return None
        end_ms = self._end_ms
        n_bytes = None if end_ms is None else self.audio_format.n_bytes(end_ms)
        return self._sent_audio()[:n_bytes]

    @property
    def size_bytes(self) -> int:
        audio = self.audio.data if isinstance(self.audio, PackedSound) else self.audio
        return len(self.text) + len(audio or b"")

    @property
    def has_sound(self) -> bool:
        is_sound = self.modality == "audio" and self.audio_format == PCM
        return is_sound and isinstance(self.audio, bytearray)

    @property
    def is_raw(self) -> bool:
        is_sent = self.status != "in_progress" and 0 < self.sent_bytes == self.made_bytes
        return self.has_sound and is_sent

    def raw_sounds(self) -> list[AudioPart]:
        return [AudioPart(np.frombuffer(self._sent_audio(), np.int16))]

    def keep_packed(self, sounds: Sequence[AudioPart]) -> None:
        [part] = sounds
        assert isinstance(part.sound, PackedSound)
        self.audio = part.sound

    def _sent_audio(self) -> bytes:
        audio = self.audio
        return audio.pcm().tobytes() if isinstance(audio, PackedSound) else bytes(audio or b"")

    @property
    def _end_ms(self) -> float | None:
        """End of the heard audio: the client's value before the playback clock's."""
        return self.heard_ms if self.truncated_ms is None else self.truncated_ms

    def _tokens_kept(self) -> int | None:
        """Number of the turn's tokens that were spoken; None if only the text is known."""
        end = self.end
        ids = end.item.token_ids if end else None
        if end is None and self.spoken and self._end_ms is not None:
            return self._tokens_spoken(min(self._end_ms, self.sent_ms))
        if end is None or not ids or not self.marks:
            return None
        if self.modality == "text":
            return min(len(ids), self.marks[-1][0]) if self.stopped else len(ids)
        end_ms = self._end_ms
        if not self.stopped and (end_ms is None or end_ms >= self.made_ms):
            return len(ids)
        # Without an end of the heard audio, all sent audio counts as heard.
        end_ms = self.sent_ms if end_ms is None else min(end_ms, self.sent_ms)
        if self.spoken:
            return min(self._tokens_spoken(end_ms), len(ids))
        made_ms = self.made_ms * self.speed
        n_frames = end.n_frames or (0 if self.stopped else round(made_ms / _FRAME_MS))
        return heard_tokens(
            end_ms * self.speed / 1000,
            n_tokens=self.marks[-1][0] if end.function_calls else len(ids),  # calls are not spoken
            n_frames=n_frames,
            spoken=end.spoken,
            frames_per_token=self.frames_per_token,
        )

    def _tokens_spoken(self, end_ms: float) -> int:
        """Number of tokens whose words end within end_ms, by the voice's own times."""
        until_s = (end_ms + _ROUNDING_MS) * self.speed / 1000
        heard = (n for n, at_s in self.spoken if at_s <= until_s)
        return max(heard, default=0)

    def _text_length(self, n_tokens: int) -> int:
        """Number of characters of n_tokens; a character may take several tokens.

        Of a part of the text with several tokens, the words that end within its share of them.
        """
        begin, before = 0, 0
        for tokens, end in self.marks:
            if tokens > n_tokens:
                share = (n_tokens - before) / (tokens - before)
                return begin + len(truncate_at_word(self.text[begin:end], share))
            begin, before = end, tokens
        return len(self.text)

    def _update_history(self) -> None:
        """Compute the history item again; an equal one keeps its key."""
        if self.status == "in_progress":
            return
        text, tokens = self.visible_text, self._tokens_kept()
        whole = self.end.item if self.end else None
        ids = whole.token_ids if whole else None
        if tokens is None or ids is None:
            if whole and text == self.text and not self.stopped:
                self._history = whole
            else:
                self._set_history(text, None)
        elif tokens >= len(ids):
            self._history = whole
        else:
            self._set_history(text, ids[:tokens])

    def _set_history(self, text: str, ids: tuple[int, ...] | None) -> None:
        parts = (TextPart(text),) if text else ()
        known = self._history
        if not (text if ids is None else ids):
            self._history = None
        elif known is None or (known.parts, known.token_ids) != (parts, ids):
            self._history = HistoryItem(
                key=new_id("key"), role="assistant", parts=parts, token_ids=ids
            )


def truncate_at_word(text: str, ratio: float) -> str:
    """The first words of a text that end within ratio (0 to 1) of its length."""
    limit = int(len(text) * ratio)
    end = 0
    for word in _WORD.finditer(text):
        if word.end() > limit:
            break
        end = word.end()
    return text[:end]
