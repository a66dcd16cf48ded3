"""The user messages that a talker knows, and the audio states that its scheduler holds for them.

In: user messages, as the orchestrator sends them. Out: prompts; TalkerStates and ForgetStates for
the scheduler, to which each message's states go once. The states are not kept here. What the
scheduler holds is bounded; of a message beyond the bound, and used longest ago, the states are
requested again when a response needs them.
Owner: one Segments per talker stage.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_live.messages import ForgetStates, Picture, TalkerStates
from sglang_live.models.family import TalkerModel

# An eighth of the context is for speech.
_SPEECH_SHARE = 8


def n_left_out(lengths: list[int], prefix_tokens: int, most_tokens: int) -> int:
    """Number of oldest messages that the prompt leaves out.

    All of them, if the newest does not fit. The response is spoken in any case: its words come from
    its own text, and the messages only influence its tone.

    Args:
        lengths: tokens of each message, the oldest first.
        prefix_tokens: of the markup behind the messages, with which speech begins.
        most_tokens: limit of a request to the engine.
    """
    room = most_tokens - most_tokens // _SPEECH_SHARE - prefix_tokens
    kept = 0
    for length in reversed(lengths):
        room -= length
        if room < 0:
            break
        kept += 1
    return len(lengths) - kept


def first_kept(keys: Sequence[str], lengths: Sequence[int], began_with: str | None) -> int:
    """Index of the message with which the prompt of a session with a window begins.

    A prompt that begins with the same message as the one before continues it: only its end is
    computed. When the window has dropped that message, nothing of the KV fits, because every later
    position counts on it. So the prompt then leaves out half of what is left, too, and the next
    ones need not begin anew until the window has come that far. The messages only influence the
    tone.

    Args:
        lengths: tokens of each message, the oldest first.
        began_with: key of the previous prompt's first message. None: there was none.
    """
    if began_with is None or not keys:
        return 0
    if began_with in keys:
        return keys.index(began_with)
    half, kept, first = sum(lengths) / 2, 0, len(keys)
    while first and (first == len(keys) or kept + lengths[first - 1] <= half):
        first -= 1
        kept += lengths[first]
    return first


# 1024 audio tokens of Qwen3-Omni in bfloat16 take 4 MiB: all that 500 users said in 80 s.
MOST_STATES_BYTES = 2 << 30


@dataclass(slots=True)
class _Segment:
    """
    ids: of the message, as the talker's prompt has them.
    n_states: its positions of audio and pictures.
    pictures: see WireSegment.
    states_id: of its TalkerStates. None: it has none, or the scheduler does not hold them.
    """

    ids: list[int]
    n_states: int
    pictures: list[Picture]
    states_id: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """
    ids: of user messages, one after the other.
    states_at: positions of audio and pictures in it.
    states: ids of the TalkerStates at these positions, in order.
    pictures: with their places in it.
    """

    ids: list[int]
    states_at: list[int]
    states: list[int]
    pictures: list[Picture]


class Segments:
    """
    Args:
        send: to the scheduler.

    Attributes:
        began_with: by session, the first message of its latest prompt.
        n_bytes: of states that the scheduler holds.
        n_requested: states that were requested again.
    """

    def __init__(
        self,
        model: TalkerModel,
        send: Callable[[TalkerStates | ForgetStates], None],
        most_bytes: int = MOST_STATES_BYTES,
    ):
        self._model = model
        self._send = send
        self._most_bytes = most_bytes
        self._sessions: dict[str, dict[str, _Segment]] = {}
        # By id, used longest ago first: the message, and the bytes of its states.
        self._held: OrderedDict[int, tuple[_Segment, int]] = OrderedDict()
        self.began_with: dict[str, str] = {}
        self._last_id = 0
        self.n_bytes = self.n_requested = 0

    @property
    def n_sessions(self) -> int:
        return len(self._sessions)

    def missing(self, session: str, keys: Iterable[str]) -> list[str]:
        """The messages that are unknown, or whose states the scheduler does not hold."""
        known = self._sessions.get(session, {})
        return [key for key in keys if key not in known or _lacks_states(known[key])]

    def add(
        self,
        session: str,
        key: str,
        token_ids: list[int],
        states: np.ndarray | None,
        pictures: Sequence[Picture] = (),
    ) -> None:
        """Add a message, or its states again.

        Args:
            token_ids: with a placeholder for each of its states.
            states: [n_states, thinker_hidden]; None: it has neither audio nor pictures.
        """
        known = self._sessions.setdefault(session, {})
        old = known.get(key)
        if old is not None:
            self.n_requested += _lacks_states(old)
            self._forget([old])
        ids = self._model.message(token_ids, states)
        n_states = 0 if states is None else len(states)
        segment = known[key] = _Segment(ids, n_states, list(pictures))
        if segment.n_states and states is not None:
            segment.states_id = self.lend(states)
            self._held[segment.states_id] = segment, states.nbytes
            self.n_bytes += states.nbytes

    def lend(self, states: np.ndarray) -> int:
        """Send states to the scheduler, which holds them until it is told to forget their id."""
        self._last_id += 1
        dtype, n_rows = states.dtype.str, len(states)
        self._send(TalkerStates(self._last_id, dtype, n_rows, states.tobytes()))
        return self._last_id

    def lengths(self, session: str, keys: Iterable[str]) -> list[int]:
        known = self._sessions.get(session, {})
        return [len(known[key].ids) for key in keys]

    def prompt(self, session: str, keys: Iterable[str]) -> Prompt:
        """The prompt of these messages. None of them may be missing."""
        known = self._sessions.get(session, {})
        ids: list[int] = []
        states_at: list[int] = []
        states: list[int] = []
        pictures: list[Picture] = []
        for key in keys:
            segment = known[key]
            pictures += [seen._replace(at=len(ids) + seen.at) for seen in segment.pictures]
            if segment.n_states:
                assert segment.states_id is not None, "its states are missing"
                states.append(segment.states_id)
                self._held.move_to_end(segment.states_id)
                first, least = len(ids), self._model.first_state_id
                states_at += [first + i for i, t in enumerate(segment.ids) if t >= least]
            ids += segment.ids
        return Prompt(ids, states_at, states, pictures)

    def keep_only(self, session: str, keys: Iterable[str]) -> None:
        """Drop the session's other messages."""
        known, kept = self._sessions.get(session, {}), frozenset(keys)
        self._forget(known.pop(key) for key in known.keys() - kept)

    def make_room(self) -> None:
        """Have the scheduler forget what was used longest ago, until the rest is within the bound.

        To be called when a prompt has been announced: it keeps its states.
        """
        out = []
        while self.n_bytes > self._most_bytes:
            segment, n_bytes = self._held.popitem(last=False)[1]
            self.n_bytes -= n_bytes
            assert segment.states_id is not None
            out.append(segment.states_id)
            segment.states_id = None
        if out:
            self._send(ForgetStates(out))

    def close(self, session: str) -> None:
        self.began_with.pop(session, None)
        self._forget(self._sessions.pop(session, {}).values())

    def _forget(self, segments: Iterable[_Segment]) -> None:
        out = []
        for segment in segments:
            if segment.states_id is not None:
                out.append(segment.states_id)
                self.n_bytes -= self._held.pop(segment.states_id)[1]
                segment.states_id = None
        if out:
            self._send(ForgetStates(out))


def _lacks_states(segment: _Segment) -> bool:
    return segment.n_states > 0 and segment.states_id is None
