"""What is said goes to the thinker while the rest is said, and the turn goes on from there."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from sglang_live.core import AudioPart, HistoryItem, ImagePart, TurnDone

from .fakes import N_STATES, ask, user

pytestmark = pytest.mark.usefixtures("must_not_hang")


def piece(n: int, *, closes: bool = False) -> HistoryItem:
    audio = AudioPart(np.full(160, n, np.int16))
    return HistoryItem(key=f"p{n}", role="user", parts=(audio,), opens=n == 0, closes=closes)


def prefill_only(name: str, *history: HistoryItem):
    return replace(ask(name, *history), prefill_only=True)


async def until_idle(session) -> None:
    await session.turn_prefill.finish()


async def done(session, turn) -> TurnDone:
    return [event async for event in session.respond(turn)][-1]


async def test_each_piece_is_sent_once_and_counts_in_the_turns_usage(world):
    session = await world.orchestrator.open_session("session")
    for n in range(2):
        assert session.prefill_turn(
            prefill_only(f"a{n}", user("u0", "hi"), *map(piece, range(n + 1)))
        )
        await until_idle(session)
    end = await done(session, ask("t", user("u0", "hi"), piece(0), piece(1), piece(2, closes=True)))
    told = [[item.key for item in opener.items] for opener in world.thinker.openers]
    assert told == [["u0", "p0"], ["p1"], ["p2"]]
    assert [opener.prefill_only for opener in world.thinker.openers] == [True, True, False]
    assert end.usage.input_audio_tokens == 3 * N_STATES
    [speak] = world.talker.openers
    assert [segment.key for segment in speak.segments] == ["u0", "p0", "p1", "p2"]


async def test_a_turn_waits_for_the_turn_prefill_and_promotes_it(world):
    world.thinker.busy = True
    session = await world.orchestrator.open_session("session")
    assert session.prefill_turn(prefill_only("a", piece(0)))
    await asyncio.sleep(0.05)
    assert not session.prefill_turn(prefill_only("b", piece(0), piece(1))), "one at a time"
    await done(session, ask("t", piece(0), piece(1, closes=True)))
    assert (world.thinker.n_promoted, world.thinker.n_ended) == (1, 0)
    assert [opener.job_id for opener in world.thinker.openers] == ["a-think", "t-think"]


async def test_no_turn_prefill_runs_beside_a_turn(world):
    world.thinker.holds_at = 1
    session = await world.orchestrator.open_session("session")
    turn = asyncio.create_task(done(session, ask("t", user("u0", "hi"))))
    await asyncio.sleep(0.05)
    assert not session.prefill_turn(prefill_only("a", user("u0", "hi"), piece(0)))
    world.thinker.release()
    await turn
    assert session.prefill_turn(prefill_only("a", user("u0", "hi"), piece(0)))


async def test_items_of_a_failed_turn_prefill_are_sent_with_the_turn(world):
    world.thinker.fails_at = 0
    session = await world.orchestrator.open_session("session")
    assert session.prefill_turn(prefill_only("a", piece(0)))
    await until_idle(session)
    world.thinker.fails_at = None
    end = await done(session, ask("t", piece(0), piece(1, closes=True)))
    assert end.status == "completed"
    assert set(world.thinker.items["session"]) >= {"p0", "p1"}


async def test_closing_a_session_cancels_its_turn_prefill(world):
    world.thinker.busy = True
    session = await world.orchestrator.open_session("session")
    assert session.prefill_turn(prefill_only("a", piece(0)))
    await asyncio.sleep(0.05)
    await session.close()
    assert not session.prefill_turn(prefill_only("b", piece(0)))
    async with asyncio.timeout(30):
        while world.thinker.cancelled != ["a-think"]:
            await asyncio.sleep(0.01)


# --- preheat ---


def preheat_of(name: str, *history: HistoryItem):
    return replace(prefill_only(name, *history), preheat=True)


async def test_a_turn_waits_for_its_preheat_and_promotes_it(world):
    world.thinker.busy = True
    session = await world.orchestrator.open_session("session")
    assert session.prefill_turn(preheat_of("a", user("u0", "hi")))
    await asyncio.sleep(0.05)
    await done(session, ask("t", user("u0", "hi"), user("u1", "and")))
    assert (world.thinker.n_promoted, world.thinker.n_ended) == (1, 0)
    opened = [(o.job_id, o.prefill_only, o.preheat) for o in world.thinker.openers]
    assert opened == [("a-think", True, True), ("t-think", False, False)]
    assert [[item.key for item in o.items] for o in world.thinker.openers] == [["u0"], ["u1"]]


async def test_what_a_preheat_computes_is_no_audio_of_the_turn(world):
    session = await world.orchestrator.open_session("session")
    history = (piece(0), piece(1, closes=True))
    assert session.prefill_turn(preheat_of("a", *history))
    await until_idle(session)
    end = await done(session, ask("t", *history, user("u1", "and")))
    alone = await world.orchestrator.open_session("alone")
    without = await done(alone, ask("t", *history, user("u1", "and")))
    assert end.usage.input_audio_tokens < without.usage.input_audio_tokens == 2 * N_STATES


async def test_the_preheat_of_a_thinker_that_is_down_is_refused(world):
    session = await world.orchestrator.open_session("session")
    replica = session._replicas["thinker"]
    client, replica.client = replica.client, None
    assert not session.prefill_turn(preheat_of("a", user("u0", "hi")))
    replica.client = client
    assert session.prefill_turn(preheat_of("a", user("u0", "hi")))
    await until_idle(session)


async def test_a_picture_before_the_utterance_counts_in_its_turns_usage_alone(world):
    session = await world.orchestrator.open_session("session")
    seen = HistoryItem(key="look", role="user", parts=(ImagePart(b"png", 64, 32),))
    assert session.prefill_turn(prefill_only("a", seen, piece(0)))
    await until_idle(session)
    end = await done(session, ask("t", seen, piece(0), piece(1, closes=True)))
    assert (end.usage.input_image_tokens, end.usage.input_audio_tokens) == (N_STATES, 2 * N_STATES)
    reply = HistoryItem(key="response-t", role="assistant", parts=(), token_ids=(1,))
    history = (seen, piece(0), piece(1, closes=True), reply)
    assert session.prefill_turn(prefill_only("b", *history, replace(piece(2), opens=True)))
    await until_idle(session)
    last = replace(piece(3, closes=True), opens=False)
    end = await done(session, ask("u", *history, replace(piece(2), opens=True), last))
    assert (end.usage.input_image_tokens, end.usage.input_audio_tokens) == (0, 2 * N_STATES)
    [told] = [
        item for opener in world.thinker.openers for item in opener.items if item.key == "look"
    ]
    assert (told.parts[0].width, told.parts[0].height) == (64, 32)
