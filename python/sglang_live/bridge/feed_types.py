"""What a talker stage tells its scheduler, and what the schedulers of both engines tell back.

Feed messages ride SGLang's own request broadcast, so every rank applies them in the same round.
"""

import msgspec

# Request ids of replies begin so; they wait in the queue until their TalkerPrompt has come.
SPEAK_PREFIX = "speak-"


class TalkerPrompt(msgspec.Struct, frozen=True, tag="prompt"):
    """Announces a request before it is sent to the engine.

    audio_at: prompt positions of thinker states; audio: their float32 rows, row-major.
    """

    rid: str
    prompt_len: int
    seed: int
    greedy: bool
    penalty: float = 1.0
    audio_at: list[int] = []
    audio: bytes = b""


class TalkerText(msgspec.Struct, frozen=True, tag="text"):
    """More text for a running reply; done: there will be no more."""

    rid: str
    ids: list[int]
    done: bool = False


class TalkerForget(msgspec.Struct, frozen=True, tag="forget"):
    """The reply is over for its caller; whatever is kept for it may go."""

    rid: str


Feed = TalkerPrompt | TalkerText | TalkerForget


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


Report = Frames | HiddenRows
