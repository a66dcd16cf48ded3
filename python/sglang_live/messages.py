"""What travels between the orchestrator and its stages.

One job is one reply in one stage. The orchestrator opens it (ThinkerRequest, TalkerRequest,
VocoderRequest), may send more (TalkerInput, VocoderFrames, Progress, Interrupt), and receives
events until ThinkerDone, TalkerDone, VocoderDone or Failed. RetainNative and MeasurePrompt open
one, too, because they need an answer: NativeRetained, PromptMeasured.
Tensors are not in the message: a TensorRef says where they are (see connectors/wire.py).
"""

from typing import get_args

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """job_id: "" for messages that concern the whole stage."""

    job_id: str


class TensorRef(msgspec.Struct, frozen=True):
    """frame: index of the raw frame that follows; shm: name of a file in shared memory."""

    dtype: str
    shape: list[int]
    frame: int = -1
    shm: str = ""


# --- any stage ---

# A gauge in Ready.load of thinkers: tokens that one prompt may have.
PROMPT_TOKENS_MOST = "prompt_tokens_most"


class Ping(Message, frozen=True, tag=True):
    """Answered by Ready."""


class Ready(Message, frozen=True, tag=True):
    """stage: its name; startup_s: process start to ready; load: gauges for /metrics."""

    stage: str
    pid: int
    startup_s: float
    load: dict[str, float] = {}


class Cancel(Message, frozen=True, tag=True):
    """Stop the job and free what it holds. Unknown or finished jobs are ignored."""


class Failed(Message, frozen=True, tag=True):
    """The job ended without a result; `code` names an error of errors.py or a reason."""

    code: str
    message: str


class Credit(Message, frozen=True, tag=True):
    """The receiver took n messages of this job; the sender may send as many more."""

    n: int


class Progress(Message, frozen=True, tag=True):
    """The consumer of this job's reply has taken consumed_s of its speech.

    flowing: it goes on by itself, one second per second. interrupts: how often this caller
    interrupts, 0 to 1.
    """

    consumed_s: float
    advancing: bool
    interrupts: float


class Interrupt(Message, frozen=True, tag=True):
    """Nobody wants more of this reply: finish it where it is, and keep its KV."""


class StreamEvent(Message, frozen=True, tag=True):
    """What the stage's policies did with this job's reply; see bridge StreamEvents."""

    what: str
    buffered_s: float


class UserSpeaking(Message, frozen=True, tag=True):
    """The caller of session_id has begun to speak; job_id is ""."""

    session_id: str


class NextUseHint(Message, frozen=True, tag=True):
    """When the caller of session_id will speak again; job_id is "". See bridge Outlook."""

    session_id: str
    buffered_s: float
    response_gap_s: float | None = None
    observed_gap_s: float | None = None


# What may help a stage to plan, about a session and beside its jobs.
SessionHint = UserSpeaking | NextUseHint


# --- thinker ---


class WireText(msgspec.Struct, frozen=True, tag="text"):
    text: str


class WireAudio(msgspec.Struct, frozen=True, tag="audio"):
    """int16 mono at 16 kHz."""

    pcm: TensorRef


class WireItem(msgspec.Struct, frozen=True, omit_defaults=True):
    key: str
    role: str
    parts: list[WireText | WireAudio]
    token_ids: list[int] | None = None
    opens: bool = True
    closes: bool = True


class ThinkerRequest(Message, frozen=True, tag=True):
    """Reply to the history named by `keys`; `items` holds those the stage may not have yet.

    session_id: "" for a job that leaves no trace. max_tokens: 0 prefills without a reply.
    window_tokens: of the session's KV, kept behind its sink; None: all of it (kv/retention.py).
    sink_tokens: None: the instructions and the markup around them.
    functions, must_call: see orchestrator Tools.
    ahead: the caller still speaks: take in what has been said, without a reply, when nobody else is
        in need; Interrupt: somebody waits for it now.
    speculative: the next history may lack what is new in this one.
    timely: somebody hears every delay; what is only read waits behind those.
    drops_oldest: a history that does not fit loses its oldest items; False: it is an error.
    cache_salt: turns with another one share none of its KV.
    """

    session_id: str
    instructions: str
    keys: list[str]
    items: list[WireItem]
    reply_key: str
    max_tokens: int | None
    temperature: float | None
    timeout_s: float
    window_tokens: int | None = None
    sink_tokens: int | None = None
    slack_tokens: int = 1
    functions: list[str] = []
    must_call: str | None = None
    prefill_only: bool = False
    speculative: bool = False
    timely: bool = True
    drops_oldest: bool = False
    cache_salt: str = ""


class ScriptRequest(Message, frozen=True, tag=True):
    """Reply with this text, word for word, to the message `key`, which has the same words.

    As with Think a UserSegment, TextTokens and ThinkerDone follow; nothing is computed.
    """

    text: str
    key: str
    timeout_s: float


class UserSegment(Message, frozen=True, tag=True):
    """One user message as the talker needs it: ids with expanded placeholders, audio states.

    states: float32 [n_placeholders, thinker_hidden].
    """

    key: str
    token_ids: list[int]
    states: TensorRef | None = None


class TextTokens(Message, frozen=True, tag=True):
    """ids: new reply tokens that are to be spoken; text: what they add to the transcript."""

    ids: list[int]
    text: str


class PrefillStarted(Message, frozen=True, tag=True):
    """No reply yet, but the engine prefills: this turn's prompt, or those before it."""


class FunctionCallProgress(Message, frozen=True, tag=True):
    """The reply grows by what is not spoken."""


class ThinkerDone(Message, frozen=True, tag=True):
    """finish: "stop", "length" or "interrupted". ids: the whole reply, calls included.

    text: what was to be spoken. calls: what the model wrote as calls of functions.
    gone: keys of items of which nothing is left in the session's window.
    """

    finish: str
    ids: list[int]
    text: str
    n_prompt: int
    n_audio: int
    n_cached: int
    rebuilt: bool
    gone: list[str] = []
    calls: list[str] = []


class RetainNative(Message, frozen=True, tag=True):
    """Bound a session of SGLang's own API, whatever it holds; see bridge RetainSession."""

    session_id: str
    sink_tokens: int
    window_tokens: int
    slack_tokens: int
    timeout_s: float


class NativeRetained(Message, frozen=True, tag=True):
    """The engine keeps to the bound from now on."""


class MeasurePrompt(Message, frozen=True, tag=True):
    """How many tokens a prompt would need at least; answered by PromptMeasured.

    Nothing is computed. instructions, functions: see ThinkerRequest.
    texts: words of its messages. clips_s: how long each of their recordings is.
    """

    instructions: str
    functions: list[str]
    texts: list[str]
    clips_s: list[float]
    timeout_s: float


class PromptMeasured(Message, frozen=True, tag=True):
    """header_tokens: of instructions and functions; item_tokens: of the messages.

    most_header_tokens, most_tokens: that a prompt may have of the former, and of both.
    """

    header_tokens: int
    item_tokens: int
    most_header_tokens: int
    most_tokens: int


class CloseSession(Message, frozen=True, tag=True):
    session_id: str


# --- talker ---


class WireSegment(msgspec.Struct, frozen=True, omit_defaults=True):
    key: str
    token_ids: list[int]
    states: TensorRef | None = None


class TalkerRequest(Message, frozen=True, tag=True):
    """Start speaking: user segments of the whole call, then the reply's first token.

    segments holds those of `segment_keys` that the stage may not have yet.
    window_frames: of a long reply's KV, kept behind its prompt; None: all of it.
    """

    session_id: str
    segment_keys: list[str]
    segments: list[WireSegment]
    voice: str
    first_id: int
    temperature: float | None
    seed: int
    timeout_s: float
    window_frames: int | None = None
    slack_frames: int = 1


class TalkerInput(Message, frozen=True, tag=True):
    ids: list[int]
    done: bool = False


class CodecFrames(Message, frozen=True, tag=True):
    """codes: int16 little-endian [n_frames, num_code_groups], in order without gaps."""

    codes: bytes
    n_frames: int = 1


class TalkerDone(Message, frozen=True, tag=True):
    finish: str
    n_frames: int


# --- vocoder ---


class VocoderRequest(Message, frozen=True, tag=True):
    timeout_s: float


class VocoderFrames(Message, frozen=True, tag=True):
    codes: bytes


class VocoderEnd(Message, frozen=True, tag=True):
    """No more frames will come."""


class Pcm(Message, frozen=True, tag=True):
    """int16 little-endian mono at 24 kHz."""

    pcm: bytes


class VocoderDone(Message, frozen=True, tag=True):
    pass


AnyMessage = (
    Ping
    | Ready
    | Cancel
    | Failed
    | Credit
    | Progress
    | Interrupt
    | StreamEvent
    | UserSpeaking
    | NextUseHint
    | ThinkerRequest
    | ScriptRequest
    | UserSegment
    | TextTokens
    | PrefillStarted
    | FunctionCallProgress
    | ThinkerDone
    | RetainNative
    | NativeRetained
    | MeasurePrompt
    | PromptMeasured
    | CloseSession
    | TalkerRequest
    | TalkerInput
    | CodecFrames
    | TalkerDone
    | VocoderRequest
    | VocoderFrames
    | VocoderEnd
    | Pcm
    | VocoderDone
)

# Messages that open a job: those that say how long it may take.
OPENERS = tuple(kind for kind in get_args(AnyMessage) if "timeout_s" in kind.__struct_fields__)

# Messages that count against a job's window; the rest must always get through.
STREAMED = (TextTokens, CodecFrames, Pcm, TalkerInput, VocoderFrames)
