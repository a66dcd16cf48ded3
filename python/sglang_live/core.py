"""What a turn is asked with and what it answers: the contract between gateway and orchestrator.

The gateway owns the conversation in protocol form and hands over the whole history each turn.
The orchestrator finds out which prefix of it the thinker's session already holds (by item key)
and sends only the rest. Everything here is frozen: a turn cannot change under its own feet.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np

from sglang_live.kv.retention import RetentionConfig
from sglang_live.policy.view import FRAME_S as FRAME_S

INPUT_RATE_HZ = 16_000
OUTPUT_RATE_HZ = 24_000
_MOST_AUDIO_TOKENS_PER_S = 13

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class AudioPart:
    """pcm: [n_samples] int16, mono, INPUT_RATE_HZ."""

    pcm: np.ndarray

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / INPUT_RATE_HZ


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistoryItem:
    """One message of the conversation as the model sees it.

    key changes whenever the content does (an item that was edited gets a new key).
    token_ids: for replies, exactly what the thinker generated, without the end-of-turn token;
    when present they stand for the parts, so that no re-tokenisation can drift.
    opens, closes: whether a message begins, and ends, with this. A message that is still being
    said is taken in piece by piece, one stretch of its audio each; they join without a seam.
    """

    key: str
    role: Role
    parts: tuple[TextPart | AudioPart, ...]
    token_ids: tuple[int, ...] | None = None
    opens: bool = True
    closes: bool = True

    def __post_init__(self) -> None:
        if not (self.opens and self.closes) and [type(p) for p in self.parts] != [AudioPart]:
            raise ValueError("a piece of a message is one stretch of audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Functions that the reply may call.

    functions: as JSON text, one each, in the form of OpenAI's chat API.
    must_call: the reply is a call, of the function with this name; "": of any. None: it may be.
    """

    functions: tuple[str, ...] = ()
    must_call: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """Ask for one reply.

    max_output_tokens: None means up to the model's limit.
    temperature: None means the model's own default; 0 is greedy for thinker and talker.
    stateless: do not touch the session's KV (out-of-band responses).
    retention: how much of its KV the session keeps; None: all.
    script: what to say, word for word, to a history of one message in writing; None: what the
        model thinks of.
    ahead: the caller still speaks: there is to be no reply yet.
    speculative: its last message may turn out to have been longer: the next history may lack it.
    frame_s: the turn is a frame: it waits for the next tick, and is to be over within this.
    drops_oldest: a history that does not fit loses its oldest items; False: it is an error.
    cache_salt: turns with another one share none of its KV.
    """

    turn_id: str
    instructions: str
    history: tuple[HistoryItem, ...]
    voice: str
    wants_audio: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stateless: bool = False
    retention: RetentionConfig | None = None
    tools: Tools = Tools()
    script: str | None = None
    prefill_only: bool = False
    speculative: bool = False
    frame_s: float | None = None
    drops_oldest: bool = False
    cache_salt: str = ""

    @property
    def is_timely(self) -> bool:
        """Whether it matters when the reply comes, beyond a reader's patience."""
        return self.wants_audio or self.frame_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContent:
    """What a prompt is to hold, as far as its length goes.

    functions: see Tools. texts: the words of messages. clips_s: seconds of each recording in them.
    """

    instructions: str = ""
    functions: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    clips_s: tuple[float, ...] = ()

    @staticmethod
    def of(
        items: Iterable[HistoryItem], instructions: str = "", functions: tuple[str, ...] = ()
    ) -> "PromptContent":
        # Within a message a token may span two texts.
        texts, clips_s = [], []
        for item in items:
            for kind, parts in groupby(item.parts, key=type):
                if kind is TextPart:
                    texts.append("".join(part.text for part in parts))
                else:
                    clips_s += [part.duration_s for part in parts]
        return PromptContent(
            instructions=instructions,
            functions=functions,
            texts=tuple(texts),
            clips_s=tuple(clips_s),
        )

    @property
    def n_characters(self) -> int:
        return sum(map(len, self.texts))

    @property
    def most_tokens(self) -> int:
        """An upper bound: a token stands for a byte of text at least."""
        texts = (self.instructions, *self.functions, *self.texts)
        n_audio = sum(_MOST_AUDIO_TOKENS_PER_S * (clip_s + 1) for clip_s in self.clips_s)
        return sum(len(text.encode()) for text in texts) + int(n_audio)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSize:
    """Tokens at least, and at most: header: instructions and functions; items: messages.

    most_header: that instructions and functions may have; most: these and messages together.
    """

    header: int
    items: int
    most_header: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    input_text_tokens: int = 0
    input_audio_tokens: int = 0
    cached_tokens: int = 0
    output_text_tokens: int = 0
    output_audio_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """n_tokens: tokens of the reply that the text so far stands for, this piece included."""

    text: str
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AudioDelta:
    """pcm: int16 little-endian mono at OUTPUT_RATE_HZ."""

    pcm: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDone:
    """The last event of a turn that did not fail.

    status: interrupted after VoiceSession.interrupt(); the reply is then what was generated.
    reply: the history item to append, with the token ids the session now holds. An item with a
    new key and the first of these ids makes the session forget the rest, not the whole reply.
    n_frames: codec frames the reply's audio has, so far as it was generated.
    calls: what the model wrote as calls of functions, as it wrote them, behind what it said. No
        audio, no transcript. Empty for an interrupted turn: what nobody waits for is not called.
    spoken: the audio is complete: the talker came to its end.
    gone: keys of history items of which nothing is left in the session; leave them out from now on.
    trace: seconds since the turn began, by mark name (see telemetry/trace.py).
    """

    status: Literal["completed", "incomplete", "interrupted"]
    reason: str | None
    reply: HistoryItem
    usage: Usage
    n_frames: int = 0
    calls: tuple[str, ...] = ()
    spoken: bool = True
    gone: tuple[str, ...] = ()
    trace: dict[str, float] = field(default_factory=dict)


TurnEvent = TranscriptDelta | AudioDelta | TurnDone
