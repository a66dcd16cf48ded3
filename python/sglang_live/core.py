"""Input and events of a turn: the contract between gateway and orchestrator.

In: TurnRequest, with the whole history of the conversation. Out: TurnEvents; the last is TurnDone.
The gateway owns the conversation. The stages identify history items by key, and receive those
only that they do not have yet. Everything here is frozen.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from typing import Literal

import numpy as np

from sglang_live.kv.retention import RetentionConfig
from sglang_live.policy.view import FRAME_S as FRAME_S
from sglang_live.sound.packed import PackedSound, digest_of

INPUT_RATE_HZ = 16_000
OUTPUT_RATE_HZ = 24_000
_MOST_AUDIO_TOKENS_PER_S = 13

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class AudioPart:
    """
    sound: [n] int16, mono, INPUT_RATE_HZ; or the same in less memory.
    begin, end: the stretch of it that this is, in samples.
    """

    sound: np.ndarray | PackedSound
    begin: int = 0
    end: int | None = None
    _packed: "AudioPart | None" = field(default=None, init=False, repr=False)

    @property
    def pcm(self) -> np.ndarray:
        """[n_samples] int16. A packed sound is decoded, which takes milliseconds."""
        whole = self.sound.pcm() if isinstance(self.sound, PackedSound) else self.sound
        return whole if (self.begin, self.end) == (0, None) else whole[self.begin : self.end]

    @property
    def is_packed(self) -> bool:
        return isinstance(self.sound, PackedSound)

    @property
    def n_samples(self) -> int:
        whole = self.sound
        n = whole.n_samples if isinstance(whole, PackedSound) else len(whole)
        return len(range(n)[self.begin : self.end])

    @property
    def duration_s(self) -> float:
        return self.n_samples / INPUT_RATE_HZ

    @property
    def size_bytes(self) -> int:
        """Of a whole sound."""
        return len(self.sound.data) if isinstance(self.sound, PackedSound) else self.sound.nbytes

    @property
    def digest(self) -> bytes:
        """The same before and after a whole sound was packed."""
        whole = self.sound
        if isinstance(whole, PackedSound) and self.n_samples == whole.n_samples:
            return whole.digest
        return digest_of(self.pcm)

    def unpacked(self) -> "AudioPart":
        """The same as samples; takes milliseconds, in any thread."""
        return AudioPart(self.pcm)

    def packed(self) -> "AudioPart":
        """The same in less memory; takes milliseconds the first time, in any thread."""
        if self.is_packed or not self.n_samples:
            return self
        if self._packed is None:
            # Who keeps it elsewhere packs it before who keeps it here.
            object.__setattr__(self, "_packed", AudioPart(PackedSound.of(self.pcm)))
        assert self._packed is not None
        return self._packed


# Side of the square of pixels that becomes one token, where a picture is as large as it comes
# (Qwen3-Omni: patches of 16, merged by 2), and tokens of the smallest picture, which is enlarged.
_TOKEN_PIXELS, _MOST_SMALLEST = 32, 128


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """
    png: written by this server, so that no engine reads a client's file (sound/pictures.py).
    width, height: in pixels.
    """

    png: bytes
    width: int
    height: int

    @property
    def size_bytes(self) -> int:
        return len(self.png)

    @property
    def digest(self) -> bytes:
        return blake2b(self.png, digest_size=32).digest()

    @property
    def least_tokens(self) -> int:
        """A lower bound of the tokens that it adds to a prompt."""
        return _least_tokens(self.width, self.height)

    @property
    def most_tokens(self) -> int:
        """An upper bound of them."""
        return _most_tokens(self.width, self.height)


def _least_tokens(width: int, height: int) -> int:
    return (width // _TOKEN_PIXELS) * (height // _TOKEN_PIXELS)


def _most_tokens(width: int, height: int) -> int:
    return (width // _TOKEN_PIXELS + 1) * (height // _TOKEN_PIXELS + 1) + _MOST_SMALLEST


# Frames of a second of a video, and of a layer of its tokens (Qwen3-Omni).
VIDEO_FPS, LAYER_FRAMES = 2, 2


@dataclass(frozen=True, slots=True, eq=False)
class VideoPart:
    """frames: [n_frames, height, width, 3] uint8, VIDEO_FPS of each second; it has no sound."""

    frames: np.ndarray

    @property
    def size_bytes(self) -> int:
        return self.frames.nbytes

    @property
    def digest(self) -> bytes:
        shape = np.asarray(self.frames.shape).tobytes()
        return blake2b(shape + self.frames.tobytes(), digest_size=32).digest()

    @property
    def least_tokens(self) -> int:
        """A lower bound of the tokens that it adds to a prompt."""
        return self._n_layers * _least_tokens(*self.frames.shape[2:0:-1])

    @property
    def most_tokens(self) -> int:
        """An upper bound of them."""
        return self._n_layers * _most_tokens(*self.frames.shape[2:0:-1])

    @property
    def _n_layers(self) -> int:
        return -(-len(self.frames) // LAYER_FRAMES)


Medium = AudioPart | ImagePart | VideoPart
Part = TextPart | Medium


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistoryItem:
    """One message of the conversation as the model sees it, or one piece of an utterance.

    key: a new one whenever the content changes.
    token_ids: of an assistant item, exactly those that the thinker generated, without the
        end-of-turn token. They replace the parts in the prompt, because tokenising the text again
        may give other tokens. In a thinker that hears by ids, also of a user's speech. None: the
        parts are tokenised.
    opens: whether a message begins with this item.
    closes: whether a message ends with this item. An utterance that is prefilled while the user
        speaks is several items, each with a stretch of its audio, or its words; the last one
        has neither if nothing was left to say.
    """

    key: str
    role: Role
    parts: tuple[Part, ...]
    token_ids: tuple[int, ...] | None = None
    opens: bool = True
    closes: bool = True

    def __post_init__(self) -> None:
        if not (self.opens and self.closes) and len(self.parts) > 1:
            raise ValueError("a piece of an utterance is one stretch of audio, or its words")

    @property
    def size_bytes(self) -> int:
        """Of text, audio, pictures and video."""
        return sum(len(p.text) if isinstance(p, TextPart) else p.size_bytes for p in self.parts)

    @property
    def raw_s(self) -> float:
        """Duration of its audio that is not packed."""
        clips = (part for part in self.parts if isinstance(part, AudioPart))
        return sum(clip.duration_s for clip in clips if not clip.is_packed)

    @property
    def is_packed(self) -> bool:
        """Whether some of its audio is."""
        return any(isinstance(part, AudioPart) and part.is_packed for part in self.parts)

    def with_audio(self, change: Callable[[AudioPart], AudioPart]) -> "HistoryItem":
        parts = (change(part) if isinstance(part, AudioPart) else part for part in self.parts)
        return replace(self, parts=tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Functions of the client that the response may call.

    functions: JSON text of each, in the form of OpenAI's chat API.
    must_call: name of the function that the response has to call; "": any function. None: the
        model chooses whether to call one.
    """

    functions: tuple[str, ...] = ()
    must_call: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunTurn:
    """What has come of a turn, which another one goes on with (see VoiceSession.begun).

    ids, said: tokens of the response that are spoken, and their text.
    codes: of its audio, as CodecFrames had them. n_frames: of them, without ends of utterances.
    speech_s: their duration.
    seed: of the talker's sampling.
    """

    ids: tuple[int, ...] = ()
    said: str = ""
    codes: tuple[bytes, ...] = ()
    n_frames: int = 0
    speech_s: float = 0.0
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """Input of one turn.

    turn_id: name in logs and of the jobs in the stages. Empty: the session numbers its turns.
    max_output_tokens: None: the model's limit.
    temperature: None: the model's own default; 0: greedy, for thinker and talker.
    stateless: whether the turn uses no session's KV (out-of-band responses).
    retention: how much of its KV the session keeps. None: all.
    script: text to speak word for word; the history then is one message with the same text. None:
        the model generates the text.
    prefill_only: whether the user still speaks, so that no response is generated.
    preheat: whether instructions and history alone are prefilled, and only where their KV is
        missing. With prefill_only.
    transcribes: whether the response is the transcript of the newest message's audio, by the
        model's recogniser. For models that read speech as text. in_detail: with its tokens, by a
        recogniser that gives "details"; translates: in English, by one that gives "translations".
    speculative: whether the user's turn may go on; the next history may lack its last message.
    flex: whether the response is not heard while it is made, so that its stages compute it when
        little that is heard needs them, in large pieces.
    frame_s: time until the turn has to be done, in seconds, for a turn that is a frame and starts
        with the next tick. None: no frame.
    drops_oldest: whether a history that does not fit loses its oldest items. False: it is an error.
    cache_salt: turns with another salt share none of its KV.
    options: texts between which the response has to choose, which begin with different tokens: it
        is not generated, but their probabilities are in TurnDone.
    speaker: what the talker knows of a voice that its prompt brings along (messages.VoiceMade), in
        the place of the model's; voice is then its name. b"": the voice is one of the model's.
    begun: what has come of this response in a turn before, of which the events tell nothing but the
        audio; the response goes on behind it. Its seed is that of the turn. None: nothing.
    """

    turn_id: str = ""
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
    transcribes: bool = False
    in_detail: bool = False
    translates: bool = False
    preheat: bool = False
    speculative: bool = False
    flex: bool = False
    frame_s: float | None = None
    drops_oldest: bool = False
    cache_salt: str = ""
    options: tuple[str, ...] = ()
    speaker: bytes = b""
    begun: BegunTurn | None = None

    @property
    def item_key(self) -> str:
        """Key of the history item that the turn's response becomes."""
        return f"response-{self.turn_id}"

    @property
    def is_timely(self) -> bool:
        """Whether the response has a deadline, because it is heard or belongs to a frame."""
        return (self.wants_audio and not self.flex) or self.frame_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContent:
    """The parts of a prompt that determine its length.

    functions: see Tools.
    texts: of the messages.
    clips_s: duration of each recording in the messages, in seconds.
    pictures, videos: in the messages.
    """

    instructions: str = ""
    functions: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    clips_s: tuple[float, ...] = ()
    pictures: tuple[ImagePart, ...] = ()
    videos: tuple[VideoPart, ...] = ()

    @staticmethod
    def of(
        items: Iterable[HistoryItem], instructions: str = "", functions: tuple[str, ...] = ()
    ) -> "PromptContent":
        # Within a message a token may span two texts.
        texts: list[str] = []
        clips_s: list[float] = []
        pictures: list[ImagePart] = []
        videos: list[VideoPart] = []
        for item in items:
            for _, parts in groupby(item.parts, key=type):
                run = list(parts)
                if isinstance(run[0], TextPart):
                    texts.append("".join(p.text for p in run if isinstance(p, TextPart)))
                clips_s += [p.duration_s for p in run if isinstance(p, AudioPart)]
                pictures += [p for p in run if isinstance(p, ImagePart)]
                videos += [p for p in run if isinstance(p, VideoPart)]
        return PromptContent(
            instructions=instructions,
            functions=functions,
            texts=tuple(texts),
            clips_s=tuple(clips_s),
            pictures=tuple(pictures),
            videos=tuple(videos),
        )

    @property
    def n_characters(self) -> int:
        return sum(map(len, self.texts))

    @property
    def most_tokens(self) -> int:
        """An upper bound of the prompt's tokens: each token of text is at least one byte."""
        texts = (self.instructions, *self.functions, *self.texts)
        n_audio = sum(_MOST_AUDIO_TOKENS_PER_S * (clip_s + 1) for clip_s in self.clips_s)
        n_seen = sum(one.most_tokens for one in self.pictures)
        n_seen += sum(one.most_tokens for one in self.videos)
        return sum(len(text.encode()) for text in texts) + int(n_audio) + n_seen

    @property
    def picture_tokens(self) -> int:
        """A lower bound of those of the pictures and videos."""
        n_tokens = sum(one.least_tokens for one in self.pictures)
        return n_tokens + sum(one.least_tokens for one in self.videos)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSize:
    """Tokens of a prompt, and their limits.

    header: tokens of instructions and functions, a lower bound.
    items: tokens of the messages, a lower bound.
    most_header: limit of the header.
    most: limit of header and messages together.
    """

    header: int
    items: int
    most_header: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    input_text_tokens: int = 0
    input_audio_tokens: int = 0
    input_image_tokens: int = 0
    input_video_tokens: int = 0
    cached_tokens: int = 0
    output_text_tokens: int = 0
    output_audio_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        seen = self.input_image_tokens + self.input_video_tokens
        return self.input_text_tokens + self.input_audio_tokens + seen

    def __add__(self, other: "Usage") -> "Usage":
        more = asdict(other)
        return Usage(**{name: n + more[name] for name, n in asdict(self).items()})


@dataclass(frozen=True, slots=True)
class HeardToken:
    """A token of what a recogniser has heard.

    piece: its text in UTF-8; a part of a character in some.
    begin_s, end_s: where it is said, in seconds of the audio.
    """

    piece: bytes
    logprob: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """n_tokens: tokens of the response up to the end of this text."""

    text: str
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TextDone:
    """The text is complete; its audio may have just begun.

    n_tokens: tokens of the text, all of which are spoken.
    """

    n_tokens: int


@dataclass(frozen=True, slots=True)
class AudioDelta:
    """
    pcm: int16 little-endian mono at OUTPUT_RATE_HZ.
    spoken: (n_tokens, end_s): the first tokens of the response are spoken at this time of all its
        audio. Empty: the voice gives no alignment of text and audio.
    """

    pcm: bytes
    spoken: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDone:
    """The last event of a turn that did not fail.

    status: "interrupted" after VoiceSession.interrupt(); the item then has what was generated.
    item: assistant item to append to the history, with the token ids that the session now holds. If
        the next history has an item with another key and the first of these ids in its place, the
        session truncates its KV there.
    n_frames: codec frames of the audio that was generated.
    function_calls: as the model wrote them, behind the spoken text. They have neither audio nor
        transcript. Empty for an interrupted turn.
    spoken: whether the audio is complete, because the talker ended it.
    gone: keys of history items of which the session holds nothing any more. The next history has to
        leave them out.
    heard: of a transcript in detail.
    trace: seconds since the turn began, by mark name (telemetry/trace.py).
    shares: probability of each of the turn's options, under the constraint that it is one of them.
    """

    status: Literal["completed", "incomplete", "interrupted"]
    reason: str | None
    item: HistoryItem
    usage: Usage
    n_frames: int = 0
    function_calls: tuple[str, ...] = ()
    spoken: bool = True
    gone: tuple[str, ...] = ()
    heard: tuple[HeardToken, ...] = ()
    trace: dict[str, float] = field(default_factory=dict)
    shares: tuple[float, ...] = ()


TurnEvent = TranscriptDelta | TextDone | AudioDelta | TurnDone
