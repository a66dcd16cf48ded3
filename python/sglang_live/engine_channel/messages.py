"""What a talker stage tells its scheduler, and what the schedulers of both engines tell back.

Feed messages ride SGLang's own request broadcast, so every rank applies them in the same round.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

# Request ids of replies begin so; they wait in the queue until their TalkerPrompt has come.
SPEAK_PREFIX = "speak-"
# Request ids of the thinker begin so where every delay is heard: the replies that a talker waits
# for, those of a beat, and what is taken in before them.
THINK_PREFIX = "think-"
# Request ids of what is taken in while a caller still speaks begin so: nobody waits for them yet.
TURN_PREFILL_PREFIX = "prefill-"

# Request ids of other replies in writing begin so.
TEXT_PREFIX = "text-"
# Job ids of frame mode end so, and request ids hold it.
FRAME_MARK = "-frame"


def is_logged(rid: str) -> bool:
    """Whether a request has lines of its own in the log: one of a turn, not of a single frame."""
    ours = (SPEAK_PREFIX, THINK_PREFIX, TURN_PREFILL_PREFIX, TEXT_PREFIX)
    return rid.startswith(ours) and FRAME_MARK not in rid


class TalkerPrompt(msgspec.Struct, frozen=True, tag="prompt"):
    """Announces a request before it is sent to the engine.

    temperature: of code 0, unless greedy; it is sampled in the model, from seed and frame alone.
    audio_at: prompt positions of thinker states; audio: their float32 rows, row-major.
    window_frames, slack_frames: what a long reply keeps of its newest frames beside its prompt, and
        how far it may grow beyond; 0: all of them (bridge/scheduler/talker_window.py).
    """

    rid: str
    prompt_len: int
    seed: int
    greedy: bool
    temperature: float = 0.9
    penalty: float = 1.0
    audio_at: list[int] = []
    audio: bytes = b""
    window_frames: int = 0
    slack_frames: int = 1


class TalkerText(msgspec.Struct, frozen=True, tag="text"):
    """More text for a running reply; done: there will be no more."""

    rid: str
    ids: list[int]
    done: bool = False


class TalkerForget(msgspec.Struct, frozen=True, tag="forget"):
    """The reply is over for its caller; whatever is kept for it may go."""

    rid: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far the consumers of running requests are; packed arrays in the order of rids.

    All callers may have news in one round, and it must not cost them the round: numbers travel
    as they lie in memory. Last write wins.

    consumed_s: float64, speech the consumer has taken of each reply (talker: the listener's ear;
    thinker: the talker). flowing: bool, whether it goes on taking one second per second by itself.
    interrupts: float64, how often this caller interrupts, 0 to 1.
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


class Interrupt(msgspec.Struct, frozen=True, tag="end"):
    """Nobody wants more of this reply: finish it where it is. Its KV stays. Never lost."""

    rid: str


class TruncateSession(msgspec.Struct, frozen=True, tag="truncate"):
    """Keep the first n_tokens of a session that has no running request. Answered by Truncated.

    n_tokens: counted from the session's beginning, tokens that were dropped included.
    """

    session: str
    n_tokens: int


class RetainSession(msgspec.Struct, frozen=True, tag="retain"):
    """From now on a session keeps its first sink_tokens and a window of the last ones.

    What lies between is dropped at once if no request is running (kv/retention.py).
    window_tokens: 0 lifts the bound. acknowledge: with Retained.
    running: request that may lose tokens already while it writes its reply; whoever counts those
        of its prompt must have done so. every_request: after and during every request.
    """

    session: str
    sink_tokens: int
    window_tokens: int
    slack_tokens: int
    acknowledge: bool = True
    running: str = ""
    every_request: bool = False


class SpeechStart(msgspec.Struct, frozen=True, tag="speech"):
    """The caller of this session speaks: a request will follow. Never lost."""

    session: str


class NextUseHint(msgspec.Struct, frozen=True, tag="next_use"):
    """When the caller of this session will want its KV again. Never lost.

    Seconds count from now, because clocks of stage and engine need not agree.

    buffered_s: until the listener will have heard all there is so far; 0: silence now.
    response_gap_s: from the end of playback to this caller's next word, on average; None before the
        first. observed_gap_s: one that was seen just now, for the average over all callers.
    """

    session: str
    buffered_s: float
    response_gap_s: float | None
    observed_gap_s: float | None


TalkerFeed = TalkerPrompt | TalkerText | TalkerForget
Feed = (
    TalkerFeed | Progress | Interrupt | TruncateSession | RetainSession | SpeechStart | NextUseHint
)


class Frames(msgspec.Struct, frozen=True, tag="frames"):
    """Codec frames of one scheduler round: parallel lists, codes are num_code_groups each."""

    rids: list[str]
    index: list[int]
    codes: list[list[int]]


class HiddenRows(msgspec.Struct, frozen=True, tag="rows"):
    """Thinker states at audio positions of one prefill chunk.

    at: absolute positions in the session; rows: float32 [len(at), thinker_hidden], row-major.
    """

    rid: str
    at: list[int]
    rows: bytes


class Truncated(msgspec.Struct, frozen=True, tag="truncated"):
    """n_tokens: what the session holds now; -1: it could not be truncated and is unchanged."""

    session: str
    n_tokens: int


class Retained(msgspec.Struct, frozen=True, tag="retained"):
    """n_tokens: what the session holds now; -1: nobody can tell, a request of it is running or it
    does not exist. n_dropped: how many it has dropped so far behind its first sink_tokens.
    """

    session: str
    n_tokens: int
    sink_tokens: int = 0
    n_dropped: int = 0


class PolicyReport(msgspec.Struct, frozen=True, tag="policy"):
    """What the policies of an engine did since its start; counters and seconds by name."""

    totals: dict[str, float]


class StreamEvents(msgspec.Struct, frozen=True, tag="notes"):
    """What became of streams in one round; parallel lists.

    what: "u0", "u1", "u2" or "unknown", the class it is in from now on; "held" or "resumed".
    buffered_s: its buffer at that moment.
    """

    rids: list[str]
    what: list[str]
    buffered_s: list[float]


Report = Frames | HiddenRows | Truncated | Retained | PolicyReport | StreamEvents
