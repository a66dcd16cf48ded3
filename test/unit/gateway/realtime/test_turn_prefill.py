"""A long turn is taken in while it is spoken, and is one message to everybody who looks at it."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from sglang_live.core import INPUT_RATE_HZ, AudioPart
from sglang_live.gateway.realtime.turns.turn_prefill import TurnPrefill
from sglang_live.interaction.input_buffer import InputBuffer
from test.unit.gateway.fakes import FakeOrchestrator, connected, services, spoken, tone

SECOND = INPUT_RATE_HZ


class Turn:
    """Speech that begins at a sample of the buffer, and who is asked to take it in."""

    def __init__(self, piece_s: float = 1.0, start: int = 0):
        self.buffer, self.start = InputBuffer(600.0), start
        self.buffer.append(np.zeros(start, np.int16))
        self.prefilled: list[int] = []
        self.willing = True
        self.pieces = TurnPrefill(piece_s, self._prefill_turn)
        self._rng = np.random.default_rng(1)

    def _prefill_turn(self, pieces) -> bool:
        if self.willing:
            self.prefilled.append(len(pieces))
        return self.willing

    def say(self, seconds: float) -> None:
        pcm = self._rng.integers(-9999, 9999, round(seconds * SECOND), np.int16)
        self.buffer.append(pcm)
        self.pieces.grow(self.buffer, self.start)

    def end(self, left_out_s: float = 0.0) -> tuple[AudioPart, tuple]:
        end = self.buffer.end_sample - round(left_out_s * SECOND)
        audio = AudioPart(self.buffer.peek(self.start, end))
        return audio, self.pieces.finish(audio)


def joined(pieces) -> np.ndarray:
    return np.concatenate([piece.parts[0].pcm for piece in pieces])


@pytest.mark.parametrize("start", [0, 7777])
def test_pieces_join_to_what_was_said(start):
    turn = Turn(start=start)
    for _ in range(34):
        turn.say(0.1)
    assert turn.prefilled == [1, 2, 3]
    audio, pieces = turn.end()
    assert np.array_equal(joined(pieces), audio.pcm)
    assert [len(piece.parts[0].pcm) for piece in pieces] == [SECOND] * 3 + [round(0.4 * SECOND)]
    assert [(piece.opens, piece.closes) for piece in pieces] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


def test_a_piece_keeps_its_name_from_when_it_was_taken_in():
    turn = Turn()
    names = []
    turn.pieces = TurnPrefill(1.0, lambda p: names.append([x.key for x in p]) or True)
    turn.say(2.5)
    _, pieces = turn.end()
    assert [piece.key for piece in pieces][:2] == names[-1]


def test_a_short_turn_is_in_one_piece():
    turn = Turn(piece_s=8.0)
    turn.say(8.0)
    assert turn.end()[1] == () and turn.prefilled == []


def test_what_nobody_took_in_is_not_cut():
    turn = Turn()
    turn.willing = False
    turn.say(2.5)
    assert turn.end()[1] == ()
    turn.willing, turn.start = True, turn.buffer.end_sample
    turn.say(1.5)
    assert turn.prefilled == [1], "the next turn begins with its first piece"


def test_a_turn_that_ended_before_its_last_piece_leaves_that_out():
    turn = Turn()
    turn.say(3.3)
    audio, pieces = turn.end(left_out_s=0.5)
    assert np.array_equal(joined(pieces), audio.pcm)
    assert len(pieces) == 3


def test_without_a_size_nothing_is_taken_in():
    turn = Turn(piece_s=0.0)
    turn.say(30.0)
    assert turn.end()[1] == () and turn.prefilled == []


# --- in a call ---


def eager(orchestrator: FakeOrchestrator):
    base = services(orchestrator)
    return replace(base, config=replace(base.config, turn_prefill_s=1.0))


async def test_a_call_takes_in_what_is_said_and_asks_with_the_same_pieces():
    orchestrator = FakeOrchestrator([spoken("Yes.")])
    async with connected(orchestrator, eager(orchestrator)) as client:
        client.append(tone(2600) + bytes(48_000))
        await client.until("response.done")
        prefilled, [turn] = orchestrator.session.prefilled, orchestrator.turns
    assert prefilled and all(t.prefill_only and not t.stateless for t in prefilled)
    assert not turn.prefill_only
    keys = [item.key for item in turn.history]
    assert [item.key for item in prefilled[-1].history] == keys[: len(prefilled[-1].history)]
    assert len(keys) == len(prefilled[-1].history) + 1
    assert len(joined(turn.history)) / SECOND == pytest.approx(3.2, abs=0.4)


async def test_while_an_answer_is_made_nothing_is_taken_in():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, *spoken("Yes.")], spoken("And yes.")])
    async with connected(orchestrator, eager(orchestrator)) as client:
        client.turn_detection({"type": "server_vad", "interrupt_response": False})
        await client.expect("session.updated")
        client.append(tone(600) + bytes(48_000))
        await client.until("response.created")
        client.append(tone(2600))
        await client.settle()
        assert orchestrator.session.prefilled == []
        gate.set()
        await client.until("response.done")
