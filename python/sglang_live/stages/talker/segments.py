"""The user messages that a talker knows, and the audio states that its scheduler holds for them.

In: user messages, as the orchestrator sends them. Out: prompts; TalkerStates and ForgetStates for
the scheduler, to which each message's states go once. The states are not kept here. What the
scheduler holds is bounded; of a message beyond the bound, and used longest ago, the states are
requested again when a response needs them.
Owner: one Segments per talker stage.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from sglang_live.engine_channel.messages import ForgetStates, TalkerStates
from sglang_live.models.family import TalkerModel

# 1024 audio tokens of Qwen3-Omni in bfloat16 take 4 MiB: all that 500 users said in 80 s.
MOST_STATES_BYTES = 2 << 30


@dataclass(slots=True)
class _Segment:
    """
    ids: of the message, as the talker's prompt has them.
    n_states: its audio positions.
    states_id: of its TalkerStates. None: it has no audio, or the scheduler does not hold it.
    """

    ids: list[int]
    n_states: int
    states_id: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """
    ids: of user messages, one after the other.
    states_at: positions of audio in it.
    states: ids of the TalkerStates at these positions, in order.
    """

    ids: list[int]
    states_at: list[int]
    states: list[int]


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
        self._send, self._most_bytes = send, most_bytes
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

    def add(self, session: str, key: str, token_ids: list[int], states: np.ndarray | None) -> None:
        """Add a message, or its states again.

        Args:
            token_ids: with a placeholder for each of its states.
            states: [n_states, thinker_hidden]; None: it has no audio.
        """
        known = self._sessions.setdefault(session, {})
        old = known.get(key)
        if old is not None:
            self.n_requested += _lacks_states(old)
            self._forget([old])
        ids = self._model.message(token_ids, states)
        segment = known[key] = _Segment(ids, 0 if states is None else len(states))
        if segment.n_states and states is not None:
            self._last_id += 1
            segment.states_id = self._last_id
            self._held[self._last_id] = segment, states.nbytes
            self.n_bytes += states.nbytes
            dtype, n_rows = states.dtype.str, segment.n_states
            self._send(TalkerStates(self._last_id, dtype, n_rows, states.tobytes()))

    def lengths(self, session: str, keys: Iterable[str]) -> list[int]:
        known = self._sessions.get(session, {})
        return [len(known[key].ids) for key in keys]

    def prompt(self, session: str, keys: Iterable[str]) -> Prompt:
        """The prompt of these messages. None of them may be missing."""
        known = self._sessions.get(session, {})
        ids: list[int] = []
        states_at: list[int] = []
        states: list[int] = []
        for key in keys:
            segment = known[key]
            if segment.n_states:
                assert segment.states_id is not None, "its states are missing"
                states.append(segment.states_id)
                self._held.move_to_end(segment.states_id)
                first, least = len(ids), self._model.first_state_id
                states_at += [first + i for i, t in enumerate(segment.ids) if t >= least]
            ids += segment.ids
        return Prompt(ids, states_at, states)

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
