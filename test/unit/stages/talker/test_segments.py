"""User messages of a talker: their states go to the scheduler once, within a bound."""

import numpy as np
import pytest

from sglang_live.messages import ForgetStates, Picture, TalkerStates
from sglang_live.models.speech_lm.talker_ids import TalkerIds
from sglang_live.stages.talker.segments import Prompt, Segments

IDS = TalkerIds(codec_vocab=10, text_vocab=100)
PAD = 99
WIDTH = 2
ROW_BYTES = 4 * WIDTH


class FakeModel:
    first_state_id = IDS.audio

    def message(self, token_ids: list[int], states: np.ndarray | None) -> list[int]:
        return IDS.user_segment(token_ids, {PAD}, states)


class World:
    """messages: to the scheduler. held: ids of states that it holds."""

    def __init__(self):
        self.messages: list[TalkerStates | ForgetStates] = []
        self.segments = Segments(FakeModel(), self.messages.append, most_bytes=10 * ROW_BYTES)

    def add(self, key: str, n_states: int, session: str = "s") -> None:
        states = np.full((n_states, WIDTH), ord(key[-1]), np.float32) if n_states else None
        self.segments.add(session, key, [1, *[PAD] * n_states, 2], states)

    @property
    def held(self) -> list[int]:
        ids: list[int] = []
        for message in self.messages:
            if isinstance(message, TalkerStates):
                ids.append(message.id)
            else:
                ids = [i for i in ids if i not in message.ids]
        return ids

    @property
    def n_sent_bytes(self) -> int:
        return sum(len(m.rows) for m in self.messages if isinstance(m, TalkerStates))


@pytest.fixture
def world():
    return World()


def test_each_message_of_a_conversation_goes_to_the_scheduler_once(world):
    for turn in range(1, 4):
        world.add(f"u{turn}", 3)
        prompt = world.segments.prompt("s", [f"u{n}" for n in range(1, turn + 1)])
        assert prompt.states == list(range(1, turn + 1))
    assert world.n_sent_bytes == 9 * ROW_BYTES == world.segments.n_bytes
    assert prompt.states_at == [1, 2, 3, 6, 7, 8, 11, 12, 13]
    assert len(prompt.ids) == 15


def test_a_message_without_audio_has_no_states(world):
    world.add("u1", 0)
    assert world.messages == []
    assert world.segments.prompt("s", ["u1"]) == Prompt([IDS.text + 1, IDS.text + 2], [], [], [])


def test_beyond_the_bound_what_was_used_longest_ago_is_forgotten_and_requested_again(world):
    world.add("u1", 4, session="old")
    world.add("u1", 4, session="new")
    world.segments.prompt("old", ["u1"])  # used again
    world.add("u2", 4, session="new")
    world.segments.make_room()
    assert world.held == [1, 3]
    assert world.segments.missing("new", ["u1", "u2", "u3"]) == ["u1", "u3"]
    assert world.segments.missing("old", ["u1"]) == []
    world.add("u1", 4, session="new")
    assert world.segments.n_requested == 1
    assert world.segments.prompt("new", ["u1", "u2"]).states == [4, 3]


def test_a_single_prompt_may_exceed_the_bound_until_it_is_announced(world):
    world.add("u1", 8)
    world.add("u2", 8)
    assert world.segments.prompt("s", ["u1", "u2"]).states == [1, 2]
    world.segments.make_room()
    assert world.held == [2]


def test_states_go_with_their_message_and_their_session(world):
    for key in ("u1", "u2", "u3"):
        world.add(key, 2)
    world.segments.keep_only("s", ["u2", "u3"])
    assert world.held == [2, 3]
    world.segments.close("s")
    assert world.held == [] and world.segments.n_bytes == 0
    assert world.segments.n_sessions == 0
    world.segments.close("s")


def test_states_in_bfloat16_take_half_the_bytes(world):
    world.segments.add("s", "u1", [PAD, PAD], np.zeros((2, WIDTH), "<u2"))
    [message] = world.messages
    assert (message.dtype, message.n_rows, len(message.rows)) == ("<u2", 2, 2 * ROW_BYTES // 2)


def test_a_prompt_has_the_places_of_its_pictures(world):
    states = np.zeros((4, WIDTH), np.float32)
    world.add("u1", 2)
    world.segments.add("s", "u2", [1, 5, *4 * [PAD], 2], states, [Picture(2, 2, 2)])
    assert world.segments.prompt("s", ["u1", "u2"]).pictures == [Picture(6, 2, 2)]
