"""Messages between the orchestrator and its stages.

A job is one turn's work in one stage. The orchestrator opens it with a ThinkerRequest,
ScriptRequest, TalkerRequest or VocoderRequest, may send TalkerInput, VocoderFrames, Progress,
Interrupt and Promote, and receives messages until ThinkerDone, TalkerDone, VocoderDone or Failed.
RetainNative and MeasurePrompt open jobs that end with NativeRetained and PromptMeasured.
"""

from typing import get_args

import msgspec

from sglang_live.message_parts import TensorRef, WireItem, WireSegment
from sglang_live.policy.view import FRAME_S


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    job_id: str  # "" in messages about a session or the whole stage


# --- any stage ---

# A gauge in a thinker's Ready.load: the most tokens of one prompt.
PROMPT_TOKENS_MOST = "prompt_tokens_most"


class Ping(Message, frozen=True, tag=True):
    """The stage answers with Ready."""


class Ready(Message, frozen=True, tag=True):
    """
    startup_s: from the start of the process until it was ready.
    load: gauges for /metrics, by name.
    """

    stage: str
    pid: int
    startup_s: float
    load: dict[str, float] = {}


class Cancel(Message, frozen=True, tag=True):
    """Stop the job and free what it holds. Unknown or finished jobs are ignored."""


class Failed(Message, frozen=True, tag=True):
    """The job ended without a result. code: of the error (errors.py)."""

    code: str
    message: str


class Credit(Message, frozen=True, tag=True):
    """The receiver has processed n messages of this job; the sender may send n more."""

    n: int


class Progress(Message, frozen=True, tag=True):
    """How far the job's consumer is: the client for speech, the talker for text.

    consumed_s: seconds of the response's speech that it has consumed.
    advancing: whether it goes on by itself, by one second per second.
    interrupts: the share of responses that this user interrupts, 0 to 1.
    """

    consumed_s: float
    advancing: bool
    interrupts: float


class Interrupt(Message, frozen=True, tag=True):
    """Finish the job's response where it is, and keep its KV."""


class Promote(Message, frozen=True, tag=True):
    """A turn waits for the end of this turn prefill: its requests go before others from now on."""


class StreamEvent(Message, frozen=True, tag=True):
    """What the stage's policies did with this job's request.

    what: see StreamEvents in engine_channel/messages.py.
    buffered_s: seconds of speech that the stage was ahead of its consumer.
    """

    what: str
    buffered_s: float


class UserSpeaking(Message, frozen=True, tag=True):
    """The user of the session has begun to speak; not speaks: it was a false alarm."""

    session_id: str
    speaks: bool = True


class NextUseHint(Message, frozen=True, tag=True):
    """When the user of the session will speak again, as far as known.

    to_play_s: seconds until the user will have heard the response: all of it once its text is
        complete, before that what was sent so far. 0: nothing plays.
    response_gap_s: from the end of playback to this user's next word, on average. None: not known.
    observed_gap_s: such a gap that has just been observed. None: no new one.
    """

    session_id: str
    to_play_s: float
    response_gap_s: float | None = None
    observed_gap_s: float | None = None


# About a session and outside of jobs: a stage may plan with it.
SessionHint = UserSpeaking | NextUseHint


# --- thinker ---


class ThinkerRequest(Message, frozen=True, tag=True):
    """Generate a response to a history.

    session_id: "" for a stateless job.
    keys: of all items of the history, in order.
    items: those that the stage may not have yet.
    item_key: key of the assistant item that the response becomes.
    max_tokens: of the response; 0: prefill only. None: the stage's limit.
    temperature: None: the model's own default.
    window_tokens: of the session's KV, kept behind its sink (kv/retention.py). None: all of it.
    sink_tokens, slack_tokens, within_tokens: as RetentionConfig has them.
    functions, must_call: see Tools in core.py.
    prefill_only: the user still speaks: prefill the utterance so far, behind other requests; after
        a Promote before them. preheat: instructions and history only, where KV is missing.
    transcribes, flex: see TurnRequest in core.py. frame: the turn is a frame.
    speculative: the next history may lack the items that are new in this one.
    timely: the response is heard, and goes before those that are only read.
    drops_oldest: a history that does not fit loses its oldest items; False: it is an error.
    cache_salt: turns with another salt share none of its KV.
    """

    session_id: str
    instructions: str
    keys: list[str]
    items: list[WireItem]
    item_key: str
    max_tokens: int | None
    temperature: float | None
    timeout_s: float
    window_tokens: int | None = None
    sink_tokens: int | None = None
    slack_tokens: int = 1
    within_tokens: int | None = None
    functions: list[str] = []
    must_call: str | None = None
    prefill_only: bool = False
    transcribes: bool = False
    preheat: bool = False
    speculative: bool = False
    timely: bool = True
    flex: bool = False
    frame: bool = False
    drops_oldest: bool = False
    cache_salt: str = ""


class ScriptRequest(Message, frozen=True, tag=True):
    """Respond with this text, word for word.

    As to a ThinkerRequest, the stage sends UserSegment, TextTokens and ThinkerDone, but its engine
    computes nothing.

    key: of the user message in the history, which has the same text.
    """

    text: str
    key: str
    timeout_s: float


class UserSegment(Message, frozen=True, tag=True):
    """One user message as the talker needs it.

    token_ids: with one placeholder per audio token.
    states: the thinker's hidden states at the placeholders, [n_placeholders, thinker_hidden], as
        engine_channel/states.py stores their dtype. None: the message has no audio.
    """

    key: str
    token_ids: list[int]
    states: TensorRef | None = None


class TextTokens(Message, frozen=True, tag=True):
    """ids: new tokens of the response, to be spoken. text: what they add to the transcript."""

    ids: list[int]
    text: str


class PrefillStarted(Message, frozen=True, tag=True):
    """There is no response yet, but the engine prefills this turn's prompt, or others before it."""


class FunctionCallProgress(Message, frozen=True, tag=True):
    """The response grows by tokens of a function call, which are not spoken."""


class ThinkerDone(Message, frozen=True, tag=True):
    """
    finish: "stop", "length" or "interrupted".
    ids: tokens of the whole response, function calls included.
    text: what is to be spoken of it.
    n_prompt: tokens of the prompt.
    n_audio: those of them that stand for new audio.
    n_cached: those of them whose KV was not computed anew.
    rebuilt: whether the session's KV was computed anew.
    gone: keys of items of which the session holds nothing any more.
    function_calls: as the model wrote them.
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


class RetainNative(Message, frozen=True, tag=True):
    """Bound the KV of a session of SGLang's own API (RetainSession in
    engine_channel/messages.py)."""

    session_id: str
    sink_tokens: int
    window_tokens: int
    slack_tokens: int
    timeout_s: float


class NativeRetained(Message, frozen=True, tag=True):
    """The bound holds from now on."""


class MeasurePrompt(Message, frozen=True, tag=True):
    """Count how many tokens a prompt needs at least. The engine computes nothing.

    instructions, functions: see ThinkerRequest.
    texts: of the messages.
    clips_s: duration of each recording in the messages, in seconds.
    """

    instructions: str
    functions: list[str]
    texts: list[str]
    clips_s: list[float]
    timeout_s: float


class PromptMeasured(Message, frozen=True, tag=True):
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


class CloseSession(Message, frozen=True, tag=True):
    """Free all that the stage holds of the session."""

    session_id: str


# --- talker ---


class TalkerRequest(Message, frozen=True, tag=True):
    """Speak a response.

    segment_keys: of all user messages of the history, in order.
    segments: those that the stage may not have yet.
    first_id: the response's first token. None: the talker reads text, all of it as TalkerInput.
    temperature: None: the stage's default; 0: greedy.
    window_frames: of a long response's KV, kept behind its prompt. None: all of it.
    slack_frames: one compaction drops at least this many. flex: see TurnRequest.
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


class SegmentsNeeded(Message, frozen=True, tag=True):
    """The stage lacks these of the job's user messages; the answer is TalkerSegments."""

    keys: list[str]


class TalkerSegments(Message, frozen=True, tag=True):
    segments: list[WireSegment]


class TalkerInput(Message, frozen=True, tag=True):
    """The next part of the response.

    ids: its tokens. text: instead of them, for a talker that reads text; n_tokens: of the response,
    up to its end. done: no more will come.
    """

    ids: list[int]
    done: bool = False
    text: str = ""
    n_tokens: int = 0


class CodecFrames(Message, frozen=True, tag=True):
    """codes: int16 little-endian [n, num_code_groups], in order, no gaps; a row of END_CODE ends an
    utterance. n_frames: without such rows, of frame_s seconds each. spoken: see AudioDelta."""

    codes: bytes
    n_frames: int = 1
    spoken: list[tuple[int, float]] = []
    frame_s: float = FRAME_S


class TalkerDone(Message, frozen=True, tag=True):
    """finish: "stop", or "length" if it missed its end. n_read: see orchestrator's TalkerJob."""

    finish: str
    n_frames: int
    n_read: int = 0


# --- vocoder ---


class VocoderRequest(Message, frozen=True, tag=True):
    """voice: of a vocoder that reads text; codes have theirs. flex: see TurnRequest."""

    timeout_s: float
    voice: str = ""
    flex: bool = False


class VocoderFrames(Message, frozen=True, tag=True):
    """codes: see CodecFrames."""

    codes: bytes


class VocoderText(Message, frozen=True, tag=True):
    """The next text of a response, for a vocoder that reads it. n_tokens: see TalkerInput."""

    text: str
    n_tokens: int


class VocoderEnd(Message, frozen=True, tag=True):
    """No more frames, or text, will come."""


class Pcm(Message, frozen=True, tag=True):
    """pcm: int16 little-endian mono at 24 kHz. spoken: see AudioDelta in core.py."""

    pcm: bytes
    spoken: list[tuple[int, float]] = []


class VocoderDone(Message, frozen=True, tag=True): ...


# Messages that open a job, with a time limit for it.
Opener = (
    ThinkerRequest | ScriptRequest | RetainNative | MeasurePrompt | TalkerRequest | VocoderRequest
)
OPENERS = get_args(Opener)

_Control = Ping | Ready | Cancel | Failed | Credit | Progress | Interrupt | Promote | StreamEvent
_OfThinker = UserSegment | TextTokens | PrefillStarted | FunctionCallProgress | ThinkerDone
_OfSession = NativeRetained | PromptMeasured | CloseSession
_OfTalker = SegmentsNeeded | TalkerSegments | TalkerInput | CodecFrames | TalkerDone
_OfVocoder = VocoderFrames | VocoderText | VocoderEnd | Pcm | VocoderDone
AnyMessage = Opener | SessionHint | _Control | _OfThinker | _OfSession | _OfTalker | _OfVocoder

# Messages that count against a job's window. Others are never delayed by a full window.
STREAMED = (TextTokens, CodecFrames, Pcm, TalkerInput, VocoderFrames, VocoderText)
