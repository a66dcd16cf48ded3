"""Messages from a stage to its scheduler (feed), and from the scheduler to its stage (reports).

Feed messages are sent with SGLang's request broadcast, so every rank applies them in the same
round.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

# Id prefix of the talker's requests; they stay in the queue until their TalkerPrompt has come.
SPEAK_PREFIX = "speak-"
# The same, of speech that is not heard while it is made; in the thinker, responses of such turns.
FLEX_PREFIX = "flex-"
SPEECH_PREFIXES = (SPEAK_PREFIX, FLEX_PREFIX)
# Id prefix of the thinker's requests whose delay is audible: responses that a talker speaks, those
# with a deadline, and the prefills before them.
THINK_PREFIX = "think-"
# Id prefix of turn prefill: the user still speaks, so no consumer waits for these requests yet.
TURN_PREFILL_PREFIX = "prefill-"
# Requests that are heard, or lead to a response that is.
HEARD_PREFIXES = (SPEAK_PREFIX, THINK_PREFIX, TURN_PREFILL_PREFIX)

# Id prefix of best-effort requests (service tier `flex`, batches): they get what listeners do not
# need. The gateway alone gives such ids, so a client cannot claim or avoid the class. With
# `batch-byN-`, N is the time at which the request's batch expires, in seconds since 1970.
BATCH_PREFIX = "batch-"
# Request ids of other replies in writing begin so.
TEXT_PREFIX = "text-"
# Job ids of frame mode end so, and request ids hold it.
FRAME_MARK = "-frame"
# Those of a warm-up hold it.
WARM_UP = "warm-up"


def is_best_effort(rid: str) -> bool:
    """Whether a request is best-effort work: its id tells, SGLang's `priority` is not read."""
    return rid.startswith((BATCH_PREFIX, FLEX_PREFIX))


def is_logged(rid: str) -> bool:
    """Whether a request has lines of its own in the log: one of a user's turn, not of a frame."""
    ours = (*SPEECH_PREFIXES, THINK_PREFIX, TURN_PREFILL_PREFIX, TEXT_PREFIX)
    return rid.startswith(ours) and FRAME_MARK not in rid and WARM_UP not in rid


class TalkerPrompt(msgspec.Struct, frozen=True, tag="prompt"):
    """Announces a request before it is sent to the engine.

    Attributes:
        temperature: of code 0, unless greedy; the model samples it from seed and frame alone.
        audio_at: prompt positions of thinker states.
        states: of TalkerStates, the ids, in the order of the prompt.
        window_frames: newest frames that a long request keeps beside its prompt; 0: all frames
            (TalkerWindow in bridge/scheduler/talker.py).
        slack_frames: frames by which a request may exceed the window before it is compacted.
    """

    rid: str
    prompt_len: int
    seed: int
    greedy: bool
    temperature: float = 0.9
    penalty: float = 1.0
    audio_at: list[int] = []
    states: list[int] = []
    window_frames: int = 0
    slack_frames: int = 1


class TalkerStates(msgspec.Struct, frozen=True, tag="states"):
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


class ForgetStates(msgspec.Struct, frozen=True, tag="forget_states"):
    """Free these TalkerStates; requests that were announced keep theirs."""

    ids: list[int]


class TalkerText(msgspec.Struct, frozen=True, tag="text"):
    """More text for a request.

    Attributes:
        done: whether this is the last text.
    """

    rid: str
    ids: list[int]
    done: bool = False


class TalkerForget(msgspec.Struct, frozen=True, tag="forget"):
    """The request has ended for the stage; the engine frees what it keeps for it."""

    rid: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of the consumers of running requests; packed arrays in the order of rids.

    All requests may have progress in one round. Packed arrays keep its cost below that of a
    round. The last message wins.

    Attributes:
        consumed_s: float64, seconds of each request's speech that its consumer has taken (talker:
            heard by the user; thinker: spoken by the talker).
        advancing: bool, whether the consumer keeps taking one second per second.
        interrupts: float64, how often this user interrupts, 0 to 1.
    """

    rids: list[str]
    consumed_s: bytes
    advancing: bytes
    interrupts: bytes

    @staticmethod
    def of(
        rids: list[str],
        consumed_s: Sequence[float],
        advancing: Sequence[bool],
        interrupts: Sequence[float],
    ) -> "Progress":
        return Progress(
            rids,
            np.asarray(consumed_s, np.float64).tobytes(),
            np.asarray(advancing, bool).tobytes(),
            np.asarray(interrupts, np.float64).tobytes(),
        )

    def columns(self) -> dict[str, np.ndarray]:
        """By name of the field; [len(rids)] each, read-only."""
        return {
            "consumed_s": np.frombuffer(self.consumed_s, np.float64),
            "advancing": np.frombuffer(self.advancing, bool),
            "interrupts": np.frombuffer(self.interrupts, np.float64),
        }


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """Finish a request at its current length. Its session keeps the KV. Delivered reliably."""

    rid: str


class Promote(msgspec.Struct, frozen=True, tag="promote"):
    """A response that will be heard waits for this request from now on. Delivered reliably."""

    rid: str


class TruncateSession(msgspec.Struct, frozen=True, tag="truncate"):
    """Keep the first n_tokens of a session that has no running request. Acknowledged by Truncated.

    Attributes:
        n_tokens: counted from the session's beginning, dropped tokens included.
        ask_id: the answer has the same one; so have those of MeasureKv and RetainSession.
    """

    session: str
    n_tokens: int
    ask_id: int = 0


class MeasureKv(msgspec.Struct, frozen=True, tag="measure_kv"):
    """Report how much of a session's KV is held on any tier. Answered by SessionKv."""

    session: str
    ask_id: int = 0


class RetainSession(msgspec.Struct, frozen=True, tag="retain"):
    """From now on a session keeps its first sink_tokens and a window of its last tokens.

    The tokens between are dropped at once if no request is running (kv/retention.py).

    Attributes:
        window_tokens: 0 lifts the bound.
        acknowledge: whether the scheduler sends Retained.
        running: id of a request that may be compacted while it decodes; its prompt's tokens must
            have been counted before. Empty: none.
        every_request: compact after and during every request of the session.
    """

    session: str
    sink_tokens: int
    window_tokens: int
    slack_tokens: int
    acknowledge: bool = True
    running: str = ""
    every_request: bool = False
    ask_id: int = 0


class SpeechStart(msgspec.Struct, frozen=True, tag="speech"):
    """The user of this session speaks: a request will follow. Delivered reliably."""

    session: str


class SpeechDismissed(msgspec.Struct, frozen=True, tag="no_speech"):
    """What seemed to be speech of this session's user was none. Delivered reliably."""

    session: str


class NextUseHint(msgspec.Struct, frozen=True, tag="next_use"):
    """When the next request of this session is expected. Delivered reliably.

    Seconds count from now, because clocks of stage and engine need not agree.

    Attributes:
        to_play_s: seconds until the user will have heard the response: all of it once its text is
            complete, before that what was sent so far. 0: nothing plays.
        response_gap_s: average time from the end of playback to this user's next word; None
            before the first.
        observed_gap_s: the latest such time, for the average over all users; None if there is no
            new one.
    """

    session: str
    to_play_s: float
    response_gap_s: float | None
    observed_gap_s: float | None


TalkerFeed = TalkerPrompt | TalkerStates | ForgetStates | TalkerText | TalkerForget
Feed = (
    TalkerFeed
    | Progress
    | Interrupt
    | Promote
    | TruncateSession
    | MeasureKv
    | RetainSession
    | SpeechStart
    | SpeechDismissed
    | NextUseHint
)


class Frames(msgspec.Struct, frozen=True, tag="frames"):
    """Codec frames of one scheduler round: parallel lists, codes are num_code_groups each."""

    rids: list[str]
    index: list[int]
    codes: list[list[int]]


class HiddenRows(msgspec.Struct, frozen=True, tag="rows"):
    """Thinker states at audio positions of one prefill chunk.

    Attributes:
        at: absolute positions in the session.
        dtype: as numpy writes it (engine_channel/states.py).
        rows: [len(at), thinker_hidden], row-major.
    """

    rid: str
    at: list[int]
    dtype: str
    rows: bytes


class Truncated(msgspec.Struct, frozen=True, tag="truncated"):
    """Result of TruncateSession.

    Attributes:
        n_tokens: position at which the session ends now; -1 if it could not be truncated and is
            unchanged.
    """

    session: str
    n_tokens: int
    ask_id: int = 0


class SessionKv(msgspec.Struct, frozen=True, tag="session_kv"):
    """Answer to MeasureKv.

    Attributes:
        n_tokens: from the session's beginning, those that its next request need not compute; 0 for
            an unknown session.
    """

    session: str
    n_tokens: int
    ask_id: int = 0


class Retained(msgspec.Struct, frozen=True, tag="retained"):
    """Result of RetainSession.

    Attributes:
        n_tokens: tokens that the session holds now; -1 if a request of it is running or it does
            not exist.
        sink_tokens: tokens before the dropped ones.
        n_dropped: tokens that compaction has dropped behind the sink so far.
    """

    session: str
    n_tokens: int
    sink_tokens: int = 0
    n_dropped: int = 0
    ask_id: int = 0


class PolicyReport(msgspec.Struct, frozen=True, tag="policy"):
    """Totals of an engine's policies since its start; counters and seconds by name."""

    totals: dict[str, float]


class StreamEvents(msgspec.Struct, frozen=True, tag="events"):
    """Events of requests in one round; parallel lists.

    Attributes:
        what: "u0", "u1", "u2" or "unknown", the request's new class; "paused" or "resumed".
        buffered_s: the request's buffer at that moment.
    """

    rids: list[str]
    what: list[str]
    buffered_s: list[float]


Report = Frames | HiddenRows | Truncated | SessionKv | Retained | PolicyReport | StreamEvents
