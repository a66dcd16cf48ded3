"""The job of one turn in each stage, and what is in its place in a model without that stage.

Each asks another replica, where its own is lost, for what has not come yet (moves.py).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np

from sglang_live.core import (
    FRAME_S,
    OUTPUT_RATE_HZ,
    AudioDelta,
    AudioPart,
    BegunTurn,
    HistoryItem,
    ImagePart,
    Part,
    TextPart,
    TurnRequest,
    VideoPart,
)
from sglang_live.errors import StageFailedError
from sglang_live.messages import (
    CodecFrames,
    FunctionCallProgress,
    Heard,
    Interrupt,
    Pcm,
    Picture,
    Promote,
    ScriptRequest,
    SegmentsNeeded,
    SoundPlace,
    StreamEvent,
    TalkerDone,
    TalkerInput,
    TalkerRequest,
    TalkerSegments,
    TextTokens,
    ThinkerDone,
    ThinkerRequest,
    UserSegment,
    VocoderDone,
    VocoderEnd,
    VocoderFrames,
    VocoderRequest,
    VocoderText,
    WireAudio,
    WireImage,
    WireItem,
    WireSegment,
    WireText,
    WireVideo,
)
from sglang_live.orchestrator.moves import MovableJob
from sglang_live.orchestrator.startup_delay import StartupDelays
from sglang_live.speakable.style import is_speakable
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.client import Job

# No job lasts longer: the longest response, heard to its end, takes 22 minutes.
JOB_TIMEOUT_S = 3600.0
# A thinker that neither generates nor prefills for this long waits behind a full KV pool.
THINKER_SILENCE_LIMIT_S = 30.0
# Flex jobs wait behind listeners, and may be silent for all of their time: a quarter of the day
# within which a batch is to be done.
FLEX_TIMEOUT_S = 6 * 3600.0

# Tokens of the response, and the time at which they have sounded (AudioDelta in core.py).
Marks = list[tuple[int, float]]
_ROUNDING_S = 1e-6
_Speech = TypeVar("_Speech")
# Called with the stage, and with what and buffered_s of a messages.StreamEvent.
OnStreamEvent = Callable[[str, str, float], None]


def timeout_s(turn: TurnRequest) -> float:
    """Longest time of a job of the turn."""
    return FLEX_TIMEOUT_S if turn.flex else JOB_TIMEOUT_S


def ignore_event(stage: str, what: str, buffered_s: float) -> None:
    """Until VoiceSession.watch sets another."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A user message as the talker needs it. See messages.WireSegment."""

    token_ids: list[int]
    states: np.ndarray | None
    pictures: list[Picture] = field(default_factory=list)


@dataclass(eq=False)
class _EngineJob:
    """segments: user messages for the talker, by key; grows as the thinker sends them."""

    _job: MovableJob
    _turn: TurnRequest
    _session_id: str
    _segments: dict[str, Segment]
    _epoch: int = 0
    on_stream_event: OnStreamEvent = ignore_event

    def report(self, heard_s: float, advancing: bool, speed: float = 1.0) -> None:
        """Report how much of the response was heard; without playback, how much was spoken."""
        self._job.post(Heard(self._job.job_id, heard_s, advancing, speed))


@dataclass(eq=False)
class ThinkerJob(_EngineJob):
    """What it sends becomes known to the stage."""

    on_call: Callable[[], None] = lambda: None
    done: ThinkerDone | None = None
    _order: Interrupt | Promote | None = None
    # What has come of the response.
    _ids: list[int] = field(default_factory=list)
    _said: str = ""

    def __post_init__(self) -> None:
        if (begun := self._turn.begun) is not None:
            self._ids, self._said = list(begun.ids), begun.said

    @property
    def so_far(self) -> tuple[tuple[int, ...], str]:
        """Tokens that are spoken, and their text."""
        return tuple(self._ids), self._said

    async def tokens(self) -> AsyncGenerator[TextTokens, None]:
        try:
            async for tokens in self._tokens_once():
                yield tokens
        except StageFailedError as error:
            if error.reason != "items_missing" or not self._job.known:
                raise
            # The stage has lost this session's items; nothing was generated yet.
            self._job.known.clear()
            async for tokens in self._tokens_once():
                yield tokens

    def interrupt(self) -> None:
        """End the response where it is: `tokens` soon ends, and the session keeps the KV."""
        self._tell(Interrupt(self._job.job_id))

    def promote(self) -> None:
        """Of a turn prefill: a turn waits for its end."""
        self._tell(Promote(self._job.job_id))

    def _tell(self, order: Interrupt | Promote) -> None:
        self._order = order
        self._job.post(order)

    async def _tokens_once(self) -> AsyncGenerator[TextTokens, None]:
        await self._job.begin(self._begin)
        limit_s = FLEX_TIMEOUT_S if self._turn.flex else THINKER_SILENCE_LIMIT_S
        events = self._job.events(ThinkerDone, silence_limit_s=limit_s)
        async for message, frames in events:
            match message:
                case UserSegment(segment=came):
                    states = wire.take(came.states, frames) if came.states else None
                    self._segments[came.key] = Segment(came.token_ids, states, came.pictures)
                case TextTokens():
                    if self._is_given and self._said:
                        continue  # all of it comes at once, and has come before a loss
                    self._ids += message.ids
                    self._said += message.text
                    yield message
                case FunctionCallProgress():
                    self._job.stays = "function_call"  # its grammar counts from the call's begin
                    self.on_call()
                case StreamEvent():
                    self.on_stream_event("thinker", message.what, message.buffered_s)
                case ThinkerDone():
                    self.done = message
                    if not self._turn.prefill_only:
                        self._job.known.add(self._turn.item_key)

    @property
    def _is_given(self) -> bool:
        """Whether no engine generates the text; a recogniser's has no tokens."""
        return self._turn.script is not None or (self._turn.transcribes and not self._ids)

    async def _begin(self, job: Job) -> None:
        turn, known = self._turn, self._job.known
        if turn.script is not None:
            [item] = turn.history
            await job.begin(ScriptRequest(job.job_id, turn.script, item.key, timeout_s(turn)))
            return
        if turn.tools.must_call is not None:
            self._job.stays = "function_call"
        tensors, kept = job.tensors(), turn.retention
        new = [item for item in turn.history if item.key not in known]
        if any(item.is_packed for item in new):
            new = await asyncio.to_thread(lambda: [i.with_audio(AudioPart.unpacked) for i in new])
        await job.begin(
            ThinkerRequest(
                job.job_id,
                session_id=self._session_id,
                instructions=turn.instructions,
                keys=[item.key for item in turn.history],
                items=[_wire_item(item, tensors) for item in new],
                item_key=turn.item_key,
                max_tokens=turn.max_output_tokens,
                temperature=turn.temperature,
                timeout_s=timeout_s(turn),
                seed=turn.seed,
                window_tokens=kept.window_tokens if kept else None,
                sink_tokens=kept.sink_tokens if kept else None,
                slack_tokens=kept.slack_tokens if kept else 1,
                within_tokens=kept.within_tokens if kept else None,
                functions=list(turn.tools.functions),
                must_call=turn.tools.must_call,
                prefill_only=turn.prefill_only,
                transcribes=turn.transcribes,
                in_detail=turn.in_detail,
                translates=turn.translates,
                preheat=turn.preheat,
                speculative=turn.speculative,
                timely=turn.is_timely,
                flex=turn.flex,
                frame=turn.frame_s is not None,
                drops_oldest=turn.drops_oldest,
                cache_salt=turn.cache_salt,
                continues=self._ids if not self._is_given else [],
                said=self._said if not self._is_given else "",
                options=list(turn.options),
                epoch=self._epoch,
            ),
            tensors,
        )
        known |= {item.key for item in new}
        if self._order is not None:
            # It came before the job began: the stage has not received it.
            job.post(self._order)


class ScriptJob:
    """In the place of a ThinkerJob. Attributes: see there."""

    def __init__(self, turn: TurnRequest):
        assert turn.script is not None, "without a language model every text is given"
        self._script = turn.script
        self.done: ThinkerDone | None = None

    async def tokens(self) -> AsyncGenerator[TextTokens, None]:
        yield TextTokens("", [], self._script)
        self.done = ThinkerDone(
            "",
            finish="stop",
            ids=[],
            text=self._script,
            n_prompt=0,
            n_audio=0,
            n_cached=0,
            rebuilt=False,
        )

    def interrupt(self) -> None:
        """Nothing is generated."""

    def promote(self) -> None:
        """Nothing is prefilled."""

    def report(self, heard_s: float, advancing: bool, speed: float = 1.0) -> None:
        """No stage has this job."""


@dataclass(eq=False)
class TalkerJob(_EngineJob):
    """Begins with the response's first letter or digit: before that there is nothing to speak.
    Only a message from the stage proves what it knows.

    reads_text: instead of tokens, and no user messages.
    speech_s: duration of the frames that have come.
    ended: whether the talker ended the speech by itself, or there was nothing to speak.
    cut: whether the talker did not end it within the bound of its text.
    n_read: tokens of the text, or of its pieces' prompts, of a talker that reads text.
    """

    reads_text: bool = False
    speech_s: float = 0.0
    ended: bool = False
    cut: bool = False
    n_read: int = 0
    _n_tokens: int = 0
    _unspoken: list[int] = field(default_factory=list)  # before the first letter
    _marks: Marks = field(default_factory=list)
    _codes: list[bytes] = field(default_factory=list)  # that have come
    _n_codes: int = 0  # of them, without ends of utterances

    def __post_init__(self) -> None:
        history, begun = self._turn.history, self._turn.begun
        if begun is not None:
            self._codes, self._n_codes = list(begun.codes), begun.n_frames
            self.speech_s = begun.speech_s
        users = [i.key for i in history if i.role == "user" and i.token_ids is None]
        self._keys = [] if self.reads_text else users
        self._is_told = asyncio.Event()  # of all messages that the thinker has prefilled
        self._begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def added_to(self, begun: BegunTurn) -> BegunTurn:
        """With the codes that have come, unless it cannot go on behind them."""
        if self._job.stays:
            return begun
        n = self._n_codes
        return replace(begun, codes=tuple(self._codes), n_frames=n, speech_s=self.speech_s)

    @property
    def n_frames(self) -> int:
        """Frames of FRAME_S that have come; other ones as if they were of that length."""
        return round(self.speech_s / FRAME_S)

    def take_marks(self) -> Marks:
        """Where words end in the speech, as far as the talker knows: those not yet taken."""
        marks, self._marks = self._marks, []
        return marks

    def cancel(self) -> None:
        self._job.cancel()

    async def write(self, ids: list[int], text: str) -> None:
        """Speak the next tokens of the response, which add `text` to it."""
        if self._turn.begun is None or self._n_tokens:  # else they are not the thinker's
            self._is_told.set()
        self._n_tokens += len(ids)
        if not self._turn.wants_audio:
            return
        if self.reads_text:
            await self._write_text(text)
            return
        self._unspoken += ids  # without a letter, such as an ellipsis, it would be noise
        if self._unspoken and (self._begun.done() or is_speakable(text)):
            await self._write_ids(self._unspoken)
            self._unspoken = []

    async def _write_text(self, text: str) -> None:
        if not text:
            return
        if not self._begun.done():
            await self._begin_with(None)
        part = TalkerInput(self._job.job_id, [], text=text, n_tokens=self._n_tokens)
        await self._job.send(part)

    async def _write_ids(self, ids: list[int]) -> None:
        if not self._begun.done():
            await self._begin_with(ids[0])
            ids = ids[1:]
        if ids:
            await self._job.send(TalkerInput(self._job.job_id, ids))

    async def end_text(self) -> None:
        """No more tokens will come."""
        self._is_told.set()
        if self._begun.done():
            end = TalkerInput(self._job.job_id, [], done=True, n_tokens=self._n_tokens)
            await self._job.send(end)
        else:
            self._begun.set_result(False)  # an empty response has no audio
            self.ended = not self._job.cancelled

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """int16 [n, num_code_groups] as they come."""
        if not await self._begun:
            return
        for codes in tuple(self._codes):
            yield codes
        async for message, _ in self._job.events(TalkerDone):
            if isinstance(message, SegmentsNeeded):
                if not self._segments.keys() >= {*message.keys}:
                    await self._is_told.wait()
                if self._forgo(message.keys):
                    self._job.again()
                else:
                    await self._job.answer(partial(self._send_segments, message.keys))
                continue
            self._note_stage_has_history()
            if isinstance(message, StreamEvent):
                self.on_stream_event("talker", message.what, message.buffered_s)
            elif isinstance(message, CodecFrames):
                self._keep_codes(message)
                self._marks += message.spoken
                yield message.codes
            elif isinstance(message, TalkerDone):
                self.ended = message.finish == "stop"
                self.cut = message.finish == "length"
                self.n_read = message.n_read

    def _keep_codes(self, frames: CodecFrames) -> None:
        self.speech_s += frames.n_frames * frames.frame_s
        self._codes.append(frames.codes)
        self._n_codes += frames.n_frames
        if (window := self._window_frames) is not None and self._n_codes > window:
            self._job.stays = "window"  # frames that were dropped are still in those behind them

    @property
    def _window_frames(self) -> int | None:
        kept = self._turn.retention
        return (kept.window_frames or kept.window_tokens) if kept else None

    async def _begin_with(self, first_id: int | None) -> None:
        await self._job.begin(partial(self._begin, first_id))
        self._begun.set_result(True)

    async def _begin(self, first_id: int | None, job: Job) -> None:
        turn, tensors, kept, known = (
            self._turn,
            job.tensors(),
            self._turn.retention,
            self._job.known,
        )
        self._forgo([key for key in self._keys if key not in known and key not in self._segments])
        new = [key for key in self._keys if key not in known]
        await job.begin(
            TalkerRequest(
                job.job_id,
                session_id=self._session_id,
                segment_keys=self._keys,
                segments=[_wire_segment(key, self._segments[key], tensors) for key in new],
                voice=turn.voice,
                first_id=first_id,
                temperature=turn.temperature,
                seed=seed_of(turn),
                timeout_s=timeout_s(turn),
                window_frames=self._window_frames,
                slack_frames=kept.slack_tokens if kept else 1,
                flex=turn.flex,
                speaker=turn.speaker,
                codes=b"".join(self._codes),
                n_frames=self._n_codes,
                epoch=self._epoch,
                text_grows=turn.script is None,
            ),
            tensors,
        )

    def _forgo(self, needed: list[str]) -> bool:
        """Leave out messages that are not there, and all older ones: the thinker has dropped them,
        or has told another server of them. Returns whether there are any."""
        missing = [key in needed and key not in self._segments for key in self._keys]
        if True in missing:
            self._keys = self._keys[len(missing) - missing[::-1].index(True) :]
        return True in missing

    async def _send_segments(self, keys: list[str], job: Job) -> None:
        """The stage does not have these any more: it has restarted, or needed their memory."""
        if unknown := set(keys) - set(self._keys):
            raise StageFailedError(f"the talker needs {len(unknown)} messages of another turn")
        tensors = job.tensors()
        segments = [_wire_segment(key, self._segments[key], tensors) for key in keys]
        await job.send(TalkerSegments(job.job_id, segments), tensors)

    def _note_stage_has_history(self) -> None:
        # The stage keeps the segments of its latest job and drops all others.
        self._job.known.clear()
        self._job.known.update(self._keys)


@dataclass(frozen=True, slots=True)
class SpokenText:
    """Text of a response for a vocoder that reads. n_tokens: of the response, up to its end."""

    text: str
    n_tokens: int


class _NoTalkerJob(Generic[_Speech]):
    """In the place of a TalkerJob, for a model without a talker. Attributes: see there."""

    n_read, cut = 0, False

    def __init__(self, turn: TurnRequest):
        self._wants_audio = turn.wants_audio
        # Without a bound: the speech of one response.
        self._speech: asyncio.Queue[_Speech | None] = asyncio.Queue()
        self._cancelled = False

    @property
    def ended(self) -> bool:
        return not self._cancelled

    def cancel(self) -> None:
        self._cancelled = True
        self._speech.put_nowait(None)

    def report(self, heard_s: float, advancing: bool, speed: float = 1.0) -> None:
        """No stage has this job."""

    async def end_text(self) -> None:
        self._speech.put_nowait(None)

    async def frames(self) -> AsyncGenerator[_Speech, None]:
        """The speech as it comes."""
        while not self._cancelled and (speech := await self._speech.get()) is not None:
            yield speech


class TextJob(_NoTalkerJob[SpokenText]):
    """The vocoder reads the response's text."""

    n_frames = 0

    def __init__(self, turn: TurnRequest):
        super().__init__(turn)
        self._n_tokens = 0

    def take_marks(self) -> Marks:
        """The vocoder has them."""
        return []

    async def write(self, ids: list[int], text: str) -> None:
        self._n_tokens += len(ids)
        if self._wants_audio and text:
            self._speech.put_nowait(SpokenText(text, self._n_tokens))


class OwnVoiceJob(_NoTalkerJob[bytes]):
    """The thinker writes the codes of its speech.

    n_codes: of its tokens that are codes.
    """

    def __init__(self, turn: TurnRequest):
        super().__init__(turn)
        self.n_codes = 0
        self._speech_s = 0.0
        self._marks: Marks = []

    @property
    def n_frames(self) -> int:
        """See TalkerJob."""
        return round(self._speech_s / FRAME_S)

    def take_marks(self) -> Marks:
        marks, self._marks = self._marks, []
        return marks

    async def write(self, ids: list[int], text: str) -> None:
        """They come with codes."""

    def speak(self, codes: bytes, spoken: Sequence[tuple[int, float]]) -> None:
        """Take the next frames (messages.TextTokens). Another thinker sends all of them again."""
        n_known = sum(end_s < self._speech_s + _ROUNDING_S for _, end_s in spoken)
        new = spoken[n_known:]
        if not new:
            return
        self.n_codes += len(new)
        self._speech_s = new[-1][1]
        self._marks += new
        if self._wants_audio:
            self._speech.put_nowait(codes[n_known * (len(codes) // len(spoken)) :])


@dataclass(eq=False)
class VocoderJob:
    """
    startup_delays: for how long the first audio is withheld. None: not at all.
    audio_s: duration of the audio that has come.
    """

    _job: MovableJob
    _turn: TurnRequest
    _startup_delays: StartupDelays | None = None
    audio_s: float = 0.0
    _sent: SoundPlace | None = None  # by the stage, so far
    _begun: bool = False
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    def cancel(self) -> None:
        self._job.cancel()

    async def decode(self, speech: bytes | SpokenText) -> None:
        """Make sound of the response's next codes or text."""
        if not self._begun:
            await self._job.begin(self._begin)
            self._begun = True
            self._ready.set()
        if isinstance(speech, SpokenText):
            message = VocoderText(self._job.job_id, speech.text, speech.n_tokens)
            await self._job.send(message)
        else:
            await self._job.send(VocoderFrames(self._job.job_id, speech))

    async def _begin(self, job: Job) -> None:
        turn = self._turn
        await job.begin(
            VocoderRequest(
                job.job_id,
                timeout_s(turn),
                voice=turn.voice,
                speaker=turn.speaker,
                flex=turn.flex,
                sent=self._sent,
            )
        )

    async def end(self) -> None:
        """No more frames, or text, will come."""
        if self._begun:
            await self._job.send(VocoderEnd(self._job.job_id))
        self._ready.set()

    def audio(self) -> AsyncGenerator[AudioDelta, None]:
        decoded = self._decoded()
        return decoded if self._startup_delays is None else self._startup_delays.delayed(decoded)

    async def _decoded(self) -> AsyncGenerator[AudioDelta, None]:
        await self._ready.wait()
        if not self._begun:
            return
        async for message, _ in self._job.events(VocoderDone):
            if isinstance(message, Pcm):
                self.audio_s += len(message.pcm) / (2 * OUTPUT_RATE_HZ)
                self._sent = message.place
                yield AudioDelta(message.pcm, tuple(message.spoken))


def _wire_item(item: HistoryItem, tensors: wire.TensorFrames) -> WireItem:
    parts = [_wire_part(part, tensors) for part in item.parts]
    ids = list(item.token_ids) if item.token_ids is not None else None
    said = parts if ids is None else []
    return WireItem(item.key, item.role, said, ids, opens=item.opens, closes=item.closes)


def _wire_part(
    part: Part, tensors: wire.TensorFrames
) -> WireText | WireAudio | WireImage | WireVideo:
    match part:
        case AudioPart():
            return WireAudio(tensors.put(part.pcm))
        case ImagePart():
            png = tensors.put(np.frombuffer(part.png, np.uint8))
            return WireImage(png, part.width, part.height)
        case VideoPart():
            return WireVideo(tensors.put(part.frames))
        case TextPart():
            return WireText(part.text)


def _wire_segment(key: str, segment: Segment, tensors: wire.TensorFrames) -> WireSegment:
    ref = tensors.put(segment.states) if segment.states is not None else None
    return WireSegment(key, segment.token_ids, ref, segment.pictures)


def seed_of(turn: TurnRequest) -> int:
    """For the talker's sampling: the turn's own, or one that its id determines."""
    if turn.seed is not None:
        return turn.seed
    if turn.begun is not None:
        return turn.begun.seed
    return int.from_bytes(blake2b(turn.turn_id.encode(), digest_size=7).digest(), "little")
