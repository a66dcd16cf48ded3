"""Messages between the orchestrator and its stages, and between a stage and its engine's scheduler.

A job is one turn's work in one stage. The orchestrator opens it with a ThinkerRequest,
ScriptRequest, TalkerRequest or VocoderRequest, may send TalkerInput, VocoderFrames, Heard,
Interrupt and Promote, and receives messages until ThinkerDone, TalkerDone, VocoderDone or Failed.
DuplexRequest and HearRequest open jobs that last as long as a call with a model that hears while it
speaks.
RetainNative, MeasurePrompt and MakeVoice open jobs that end with NativeRetained, PromptMeasured
and VoiceMade. Tensors travel beside a message: a TensorRef says where (stages/transport/wire.py).

A stage sends its scheduler Feed and receives Report. Feed is sent with SGLang's request broadcast,
so that every rank applies it in the same round. What both channels carry is defined once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from sglang_live.core import HeardToken
from sglang_live.policy.view import FRAME_S


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """About a job. job_id: "": about the whole stage."""

    job_id: str


class Order(msgspec.Struct, frozen=True, tag=True):
    """To a job, and from its stage to the job's request in the engine. to: its id."""

    to: str

    @property
    def job_id(self) -> str:
        return self.to


class SessionMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """About a session. session_id: between a stage and its engine, of the engine's session."""

    session_id: str

    @property
    def job_id(self) -> str:
        return ""


# --- to a stage, and on to its engine ---


class Interrupt(Order, frozen=True):
    """Finish the response where it is, and keep its KV."""


class Promote(Order, frozen=True):
    """A turn waits for the end of this turn prefill: it goes before other requests from now on."""


class UserSpeaking(SessionMessage, frozen=True):
    """The user has begun to speak, so that a request will follow. Not speaks: a false alarm."""

    speaks: bool = True


class NextUseHint(SessionMessage, frozen=True):
    """When the user will speak again, as far as known, in seconds from now.

    to_play_s: until the user will have heard the response: all of it once its text is complete,
        before that what was sent so far. 0: nothing plays.
    response_gap_s: from the end of playback to this user's next word, on average. None: not known.
    observed_gap_s: such a gap that has just been observed. None: no new one.
    """

    to_play_s: float
    response_gap_s: float | None = None
    observed_gap_s: float | None = None


# About a session and outside of jobs: a stage may plan with it.
SessionHint = UserSpeaking | NextUseHint


class Heard(Message, frozen=True):
    """How much of a job's response was heard; without playback, how much the talker has spoken.

    heard_s: seconds of the response's speech; inf: all that will be made until the next report.
    advancing: whether that grows by itself, by `speed` seconds per second.
    speed: of the speech when it is heard.
    """

    heard_s: float
    advancing: bool
    speed: float = 1.0


# --- any stage ---

# A gauge in a thinker's Ready.load: the most tokens of one prompt.
PROMPT_TOKENS_MOST = "prompt_tokens_most"


class Ping(Message, frozen=True):
    """The stage answers with Ready."""


class Ready(Message, frozen=True):
    """
    startup_s: from the start of the process until it was ready.
    load: gauges for /metrics, by name.
    protocol: of its messages (stages/transport/protocol.py). "": of a version before there was one.
    """

    stage: str
    pid: int
    startup_s: float
    load: dict[str, float] = {}
    protocol: str = ""


class Cancel(Message, frozen=True):
    """Stop the job and free what it holds. Unknown or finished jobs are ignored."""


class Failed(Message, frozen=True):
    """The job ended without a result. code: of the error (errors.py)."""

    code: str
    message: str


class Credit(Message, frozen=True):
    """The receiver has processed n messages of this job; the sender may send n more."""

    n: int


class StreamEvent(Message, frozen=True):
    """What the stage's policies did with this job's request.

    what: see StreamEvents.
    buffered_s: seconds of speech that the stage was ahead of its consumer.
    """

    what: str
    buffered_s: float


class CloseSession(SessionMessage, frozen=True):
    """Free all that the stage holds of the session."""


# --- parts of messages ---


class TensorRef(msgspec.Struct, frozen=True):
    """
    dtype: as numpy writes it, little-endian.
    frame: index among the raw frames behind the message. -1: the tensor is in shared memory.
    shm: name of a file in shared memory. "": the tensor is in a frame.
    """

    dtype: str
    shape: list[int]
    frame: int = -1
    shm: str = ""


class WireText(msgspec.Struct, frozen=True, tag="text"):
    text: str


class WireAudio(msgspec.Struct, frozen=True, tag="audio"):
    """pcm: int16 mono at 16 kHz."""

    pcm: TensorRef


class WireImage(msgspec.Struct, frozen=True, tag="image"):
    """An ImagePart of core.py. png: uint8, the file."""

    png: TensorRef
    width: int
    height: int


class WireVideo(msgspec.Struct, frozen=True, tag="video"):
    """A VideoPart of core.py."""

    frames: TensorRef


class WireItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A HistoryItem of core.py."""

    key: str
    role: str
    parts: list[WireText | WireAudio | WireImage | WireVideo]
    token_ids: list[int] | None = None
    opens: bool = True
    closes: bool = True


class Picture(NamedTuple):
    """Tokens of a picture, or of a video.

    at: place of the first. rows, columns: of each layer.
    layers: one after the other. step: positions from one to the next, for the talker.
    """

    at: int
    rows: int
    columns: int
    layers: int = 1
    step: int = 0

    @property
    def n_tokens(self) -> int:
        return self.layers * self.rows * self.columns

    @property
    def n_positions(self) -> int:
        """That of the longest side (Qwen2-VL, arXiv 2409.12191)."""
        return max((self.layers - 1) * self.step + 1, self.rows, self.columns)


class WireSegment(msgspec.Struct, frozen=True, omit_defaults=True):
    """One user message as the talker needs it.

    token_ids: with one placeholder for each token of audio or of a picture.
    states: the thinker's hidden states at the placeholders, [n_placeholders, thinker_hidden], as
        engine_channel/states.py stores their dtype. None: the message has neither.
    pictures: with places in token_ids, in order.
    """

    key: str
    token_ids: list[int]
    states: TensorRef | None = None
    pictures: list[Picture] = []


# --- thinker ---


class ThinkerRequest(Message, frozen=True):
    """Generate a response to a history.

    session_id: "" for a stateless job. epoch: see VoiceSession.
    keys: of all items of the history, in order.
    items: those that the stage may not have yet.
    item_key: key of the assistant item that the response becomes.
    max_tokens: of the response; 0: prefill only. None: the stage's limit.
    temperature: None: the model's own default.
    seed: of its sampling, which SGLang heeds in its deterministic mode alone. None: any.
    window_tokens: of the session's KV, kept behind its sink (kv/retention.py). None: all of it.
    sink_tokens, slack_tokens, within_tokens: as RetentionConfig has them.
    functions, must_call: see Tools in core.py.
    prefill_only: the user still speaks: prefill the utterance so far, behind other requests; after
        a Promote before them. preheat: instructions and history only, where KV is missing.
    transcribes, in_detail, translates, flex: see TurnRequest in core.py.
    frame: the turn is a frame.
    speculative: the next history may lack the items that are new in this one.
    timely: the response is heard, and goes before those that are only read.
    drops_oldest: a history that does not fit loses its oldest items; False: it is an error.
    cache_salt: turns with another salt share none of its KV.
    continues: tokens of the response that another replica has generated: to be gone on behind.
    said: their text, as TextTokens had it.
    options: see TurnRequest in core.py.
    """

    session_id: str
    instructions: str
    keys: list[str]
    items: list[WireItem]
    item_key: str
    max_tokens: int | None
    temperature: float | None
    timeout_s: float
    seed: int | None = None
    window_tokens: int | None = None
    sink_tokens: int | None = None
    slack_tokens: int = 1
    within_tokens: int | None = None
    functions: list[str] = []
    must_call: str | None = None
    prefill_only: bool = False
    transcribes: bool = False
    in_detail: bool = False
    translates: bool = False
    preheat: bool = False
    speculative: bool = False
    timely: bool = True
    flex: bool = False
    frame: bool = False
    drops_oldest: bool = False
    cache_salt: str = ""
    continues: list[int] = []
    said: str = ""
    options: list[str] = []
    epoch: int = 0


class ScriptRequest(Message, frozen=True):
    """Respond with this text, word for word.

    As to a ThinkerRequest, the stage sends UserSegment, TextTokens and ThinkerDone, but its engine
    computes nothing.

    key: of the user message in the history, which has the same text.
    """

    text: str
    key: str
    timeout_s: float


class UserSegment(Message, frozen=True):
    """One user message of the history, for the talker."""

    segment: WireSegment


class TextTokens(Message, frozen=True):
    """ids: new tokens of the response, to be spoken. text: what they add to the transcript.
    codes, spoken: of a thinker that speaks itself, the next frames, and for each (n_tokens, end_s):
    the number of the response's tokens up to it, and when it ends in the speech. Behind a response
    that it continues, those of all frames."""

    ids: list[int]
    text: str
    codes: bytes = b""
    spoken: list[tuple[int, float]] = []


class PrefillStarted(Message, frozen=True):
    """There is no response yet, but the engine prefills this turn's prompt, or others before it."""


class FunctionCallProgress(Message, frozen=True):
    """The response grows by tokens of a function call, which are not spoken."""


class ThinkerDone(Message, frozen=True):
    """
    finish: "stop", "length" or "interrupted".
    ids: tokens of the whole response, function calls included.
    text: what is to be spoken of it.
    n_prompt: tokens of the prompt, without those of the response that it continues.
    n_audio, n_image, n_video: those of them that stand for new audio, pictures and videos.
    n_cached: those of them whose KV was not computed anew.
    rebuilt: whether the session's KV was computed anew.
    gone: keys of items of which the session holds nothing any more.
    function_calls: as the model wrote them.
    shares: see TurnDone in core.py.
    heard: of a transcript in detail.
    """

    finish: str
    ids: list[int]
    text: str
    n_prompt: int
    n_audio: int
    n_cached: int
    rebuilt: bool
    gone: list[str] = []
    function_calls: list[str] = []
    shares: list[float] = []
    heard: list[HeardToken] = []
    n_image: int = 0
    n_video: int = 0


class RetainNative(Message, frozen=True):
    """Bound the KV of a session of SGLang's own API, as RetainSession does."""

    session_id: str
    sink_tokens: int
    window_tokens: int
    slack_tokens: int
    timeout_s: float


class NativeRetained(Message, frozen=True):
    """The bound holds from now on."""


class MeasurePrompt(Message, frozen=True):
    """Count how many tokens a prompt needs at least. The engine computes nothing.

    instructions, functions: see ThinkerRequest.
    texts: of the messages.
    clips_s: duration of each recording in the messages, in seconds.
    picture_tokens: of all pictures and videos in them, at least.
    """

    instructions: str
    functions: list[str]
    texts: list[str]
    clips_s: list[float]
    timeout_s: float
    picture_tokens: int = 0


class PromptMeasured(Message, frozen=True):
    """
    header_tokens: of instructions and functions.
    item_tokens: of the messages.
    most_header_tokens: limit of the header.
    most_tokens: limit of header and messages together.
    """

    header_tokens: int
    item_tokens: int
    most_header_tokens: int
    most_tokens: int


# --- talker ---


class TalkerRequest(Message, frozen=True):
    """Speak a response.

    epoch: see VoiceSession.
    segment_keys: of all user messages of the history, in order.
    segments: those that the stage may not have yet.
    first_id: the response's first token. None: the talker reads text, all of it as TalkerInput.
    temperature: None: the stage's default; 0: greedy.
    window_frames: of a long response's KV, kept behind its prompt. None: all of it.
    slack_frames: one compaction drops at least this many. flex: see TurnRequest.
    speaker: of a voice that is not one of the talker's, as in VoiceMade.
    codes: that another replica has made of this response, as CodecFrames has them: to be gone on
        behind. All text comes again. n_frames: of them, without ends of utterances.
    text_grows: whether a language model writes the text meanwhile.
    """

    session_id: str
    segment_keys: list[str]
    segments: list[WireSegment]
    voice: str
    first_id: int | None
    temperature: float | None
    seed: int
    timeout_s: float
    window_frames: int | None = None
    slack_frames: int = 1
    flex: bool = False
    speaker: bytes = b""
    codes: bytes = b""
    n_frames: int = 0
    epoch: int = 0
    text_grows: bool = True


class MakeVoice(Message, frozen=True):
    """Make a voice of a recording; answered by VoiceMade.

    samples: [n] float32 in [-1, 1], at the model's voice_rate_hz (ModelFacts).
    """

    samples: TensorRef
    timeout_s: float


class VoiceMade(Message, frozen=True):
    """speaker: float32 little-endian; see VoiceMaker."""

    speaker: bytes


class SegmentsNeeded(Message, frozen=True):
    """The stage lacks these of the job's user messages; the answer is TalkerSegments."""

    keys: list[str]


class TalkerSegments(Message, frozen=True):
    segments: list[WireSegment]


class TalkerInput(Message, frozen=True):
    """The next part of the response.

    ids: its tokens. text: instead of them, for a talker that reads text; n_tokens: of the response,
    up to its end. done: no more will come.
    """

    ids: list[int]
    done: bool = False
    text: str = ""
    n_tokens: int = 0


class CodecFrames(Message, frozen=True):
    """codes: int16 little-endian [n, num_code_groups], in order, no gaps; a row of END_CODE ends an
    utterance. n_frames: without such rows, of frame_s seconds each. spoken: see AudioDelta."""

    codes: bytes
    n_frames: int = 1
    spoken: list[tuple[int, float]] = []
    frame_s: float = FRAME_S


class TalkerDone(Message, frozen=True):
    """finish: "stop", or "length" if it missed its end. n_read: see orchestrator's TalkerJob."""

    finish: str
    n_frames: int
    n_read: int = 0


class DuplexRequest(Message, frozen=True):
    """Hear and speak at the same time, until the job is cancelled: one DuplexFrames for the begin,
    and one for each HeardFrame.

    role: who it is, in words. temperature: see TalkerRequest.
    window_frames: of the call's newest frames in KV, kept behind its prompt; None: all that the
        model's context holds.
    own, heard: the newest frames of a call that another engine has had, as DuplexFrames and
        HeardFrame have them: n_frames of its own, and at least as many of the user but one.
    """

    voice: str
    role: str
    temperature: float | None
    seed: int
    timeout_s: float
    window_frames: int | None = None
    own: bytes = b""
    heard: bytes = b""
    n_frames: int = 0


class HeardFrame(Message, frozen=True):
    """The user's next frame, from a vocoder and to a talker. codes: int16 little-endian."""

    codes: bytes


class DuplexFrames(Message, frozen=True):
    """The model's next frame.

    frame: int16 little-endian, its text token and its codes.
    codes: of the sound that is complete with it, as CodecFrames has them; empty at the begin.
    text: that it adds to the transcript.
    """

    frame: bytes
    codes: bytes
    text: str = ""


# --- vocoder ---


class SoundPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a vocoder is with the sound of a response.

    utterance: number of the latest one, from 0; of a vocoder that reads text, of the piece.
    n_done: codec frames of it, with those behind its end; of a vocoder that reads text, samples.
    begun_s: when it began in the sound; of a vocoder that reads text.
    early: whether its first words were sent before the rest was read; of such a vocoder.
    """

    utterance: int = 0
    n_done: int = 0
    begun_s: float = 0.0
    early: bool = False


class VocoderRequest(Message, frozen=True):
    """
    voice: of a vocoder that reads text, or whose decoder has voices. flex: see TurnRequest.
    speaker: see TalkerRequest, for a decoder with voices.
    sent: all input comes again, and the sound up to there was sent by another replica. None: none.
    each_frame: every frame sounds at once, alone.
    """

    timeout_s: float
    each_frame: bool = False
    voice: str = ""
    speaker: bytes = b""
    flex: bool = False
    sent: SoundPlace | None = None


class HearRequest(Message, frozen=True):
    """Encode a user's sound until the job is cancelled: a HeardFrame for each UserSound."""

    timeout_s: float


class UserSound(Message, frozen=True):
    """pcm: one frame of the codec, int16 little-endian mono at 24 kHz."""

    pcm: bytes


class VocoderFrames(Message, frozen=True):
    """codes: see CodecFrames."""

    codes: bytes


class VocoderText(Message, frozen=True):
    """The next text of a response, for a vocoder that reads it. n_tokens: see TalkerInput."""

    text: str
    n_tokens: int


class VocoderEnd(Message, frozen=True):
    """No more frames, or text, will come."""


class Pcm(Message, frozen=True):
    """pcm: int16 little-endian mono at 24 kHz. spoken: see AudioDelta in core.py. place: at its
    end."""

    pcm: bytes
    spoken: list[tuple[int, float]] = []
    place: SoundPlace | None = None


class VocoderDone(Message, frozen=True): ...


# Messages that open a job, with a time limit for it.
Opener = (
    ThinkerRequest
    | ScriptRequest
    | RetainNative
    | MeasurePrompt
    | TalkerRequest
    | MakeVoice
    | VocoderRequest
    | DuplexRequest
    | HearRequest
)
_Control = Ping | Ready | Cancel | Failed | Credit | Heard | Interrupt | Promote | StreamEvent
_OfThinker = UserSegment | TextTokens | PrefillStarted | FunctionCallProgress | ThinkerDone
_OfSession = NativeRetained | PromptMeasured | CloseSession
_OfTalker = SegmentsNeeded | TalkerSegments | TalkerInput | CodecFrames | TalkerDone | VoiceMade
_OfVocoder = VocoderFrames | VocoderText | VocoderEnd | Pcm | VocoderDone
_OfDuplex = HeardFrame | DuplexFrames | UserSound
_OfStages = _OfThinker | _OfTalker | _OfVocoder | _OfDuplex
AnyMessage = Opener | SessionHint | _Control | _OfSession | _OfStages

# Messages that count against a job's window. Others are never delayed by a full window.
STREAMED = (
    TextTokens,
    CodecFrames,
    Pcm,
    TalkerInput,
    VocoderFrames,
    VocoderText,
    HeardFrame,
    DuplexFrames,
    UserSound,
)


# --- from a stage to its scheduler ---


class EngineMessage(msgspec.Struct, frozen=True, tag=True): ...


class HeardOfMany(EngineMessage, frozen=True):
    """Heard of the engine's requests, as packed arrays in the order of rids: all of them may have
    news in one round, and reading these must cost less than a round. The last message wins.

    heard_s, speed: float64. advancing: bool.
    """

    rids: list[str]
    heard_s: bytes
    advancing: bytes
    speed: bytes

    @staticmethod
    def of(
        rids: list[str],
        heard_s: Sequence[float],
        advancing: Sequence[bool],
        speed: Sequence[float] | None = None,
    ) -> "HeardOfMany":
        """speed: None: all are 1."""
        return HeardOfMany(
            rids,
            np.asarray(heard_s, np.float64).tobytes(),
            np.asarray(advancing, bool).tobytes(),
            np.asarray([1.0] * len(rids) if speed is None else speed, np.float64).tobytes(),
        )

    def columns(self) -> dict[str, np.ndarray]:
        """By name of the field; [len(rids)] each, read-only."""
        return {
            "heard_s": np.frombuffer(self.heard_s, np.float64),
            "advancing": np.frombuffer(self.advancing, bool),
            "speed": np.frombuffer(self.speed, np.float64),
        }


class TruncateSession(SessionMessage, frozen=True):
    """Keep the first n_tokens of a session that has no running request. Acknowledged by Truncated.

    Attributes:
        n_tokens: counted from the session's beginning, dropped tokens included.
        ask_id: the answer has the same one; so have those of MeasureKv and RetainSession.
    """

    n_tokens: int
    ask_id: int = 0


class MeasureKv(SessionMessage, frozen=True):
    """Report how much of a session's KV is held on any tier. Answered by SessionKv."""

    ask_id: int = 0


class RetainSession(SessionMessage, frozen=True):
    """From now on a session keeps its first sink_tokens and a window of its last tokens.

    The tokens between are dropped at once if no request is running (kv/retention.py).

    Attributes:
        window_tokens: 0 lifts the bound.
        acknowledge: whether the scheduler sends Retained.
        running: id of a request that may be compacted while it decodes; its prompt's tokens must
            have been counted before. Empty: none.
        every_request: compact after and during every request of the session.
    """

    sink_tokens: int
    window_tokens: int
    slack_tokens: int
    acknowledge: bool = True
    running: str = ""
    every_request: bool = False
    ask_id: int = 0


class TalkerPrompt(EngineMessage, frozen=True):
    """Announces a request before it is sent to the engine.

    Attributes:
        temperature: of code 0, unless greedy; the model samples it from seed and frame alone.
        audio_at: prompt positions of thinker states.
        pictures: those of them that are of pictures (see Picture), ascending.
        states: of TalkerStates, the ids, in the order of the prompt.
        window_frames: newest frames that a long request keeps beside its prompt; 0: all frames
            (TalkerWindow in bridge/scheduler/talker.py).
        slack_frames: frames by which a request may exceed the window before it is compacted.
        codes: of the n_frames frames that another engine has made of it, [n_frames, n_codes] int16
            little-endian: the request goes on behind them.
        least_frames: before which the model may not end, if it keeps to it (FrameLM).
        block: of a request whose text comes between its frames (MixedLM), frames behind the newest
            text of its prompt; -1: of another one.
    """

    rid: str
    prompt_len: int
    seed: int
    greedy: bool
    temperature: float = 0.9
    penalty: float = 1.0
    least_frames: int = 0
    audio_at: list[int] = []
    states: list[int] = []
    window_frames: int = 0
    slack_frames: int = 1
    codes: bytes = b""
    n_frames: int = 0
    pictures: list[Picture] = []
    block: int = -1


class TalkerStates(EngineMessage, frozen=True):
    """Thinker states of one user message, which prompts refer to until ForgetStates.

    Attributes:
        id: chosen by the stage, never used again.
        dtype: as numpy writes it (engine_channel/states.py).
        rows: [n_rows, thinker_hidden], row-major.
    """

    id: int
    dtype: str
    n_rows: int
    rows: bytes


class ForgetStates(EngineMessage, frozen=True):
    """Free these TalkerStates; requests that were announced keep theirs."""

    ids: list[int]


class TalkerText(EngineMessage, frozen=True):
    """More text for a request.

    Attributes:
        done: whether this is the last text.
        heard: frames of the user, codes of each, for a model that gets these instead.
    """

    rid: str
    ids: list[int]
    done: bool = False
    heard: list[list[int]] = []


class TalkerForget(EngineMessage, frozen=True):
    """The request has ended for the stage; the engine frees what it keeps for it."""

    rid: str


TalkerFeed = TalkerPrompt | TalkerStates | ForgetStates | TalkerText | TalkerForget
_OfSessions = TruncateSession | MeasureKv | RetainSession | UserSpeaking | NextUseHint
Feed = TalkerFeed | HeardOfMany | Interrupt | Promote | _OfSessions


# --- from a scheduler to its stage ---


class Frames(EngineMessage, frozen=True):
    """Codec frames of one scheduler round: parallel lists, codes are num_code_groups each."""

    rids: list[str]
    index: list[int]
    codes: list[list[int]]


class HiddenRows(EngineMessage, frozen=True):
    """Thinker states at positions of audio and pictures of one prefill chunk.

    Attributes:
        at: absolute positions in the session.
        pictures: of which some of the positions are; their places are such positions, too.
        dtype: as numpy writes it (engine_channel/states.py).
        rows: [len(at), thinker_hidden], row-major.
    """

    rid: str
    at: list[int]
    dtype: str
    rows: bytes
    pictures: list[Picture] = []


class Truncated(SessionMessage, frozen=True):
    """Result of TruncateSession.

    Attributes:
        n_tokens: position at which the session ends now; -1 if it could not be truncated and is
            unchanged.
    """

    n_tokens: int
    ask_id: int = 0


class SessionKv(SessionMessage, frozen=True):
    """Answer to MeasureKv.

    Attributes:
        n_tokens: from the session's beginning, those that its next request need not compute; 0 for
            an unknown session.
    """

    n_tokens: int
    ask_id: int = 0


class Retained(SessionMessage, frozen=True):
    """Result of RetainSession.

    Attributes:
        n_tokens: tokens that the session holds now; -1 if a request of it is running or it does
            not exist.
        sink_tokens: tokens before the dropped ones.
        n_dropped: tokens that compaction has dropped behind the sink so far.
    """

    n_tokens: int
    sink_tokens: int = 0
    n_dropped: int = 0
    ask_id: int = 0


class PolicyReport(EngineMessage, frozen=True):
    """Totals of an engine's policies since its start; counters and seconds by name."""

    totals: dict[str, float]


class StreamEvents(EngineMessage, frozen=True):
    """Events of requests in one round; parallel lists.

    Attributes:
        what: "u0", "u1", "u2" or "unknown", the request's new class; "paused" or "resumed".
        buffered_s: the request's buffer at that moment.
    """

    rids: list[str]
    what: list[str]
    buffered_s: list[float]


Report = Frames | HiddenRows | Truncated | SessionKv | Retained | PolicyReport | StreamEvents
