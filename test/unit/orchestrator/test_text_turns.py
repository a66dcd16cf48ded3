"""Turns of a model without a talker: the vocoder reads the text."""

import asyncio

import numpy as np
import pytest

from sglang_live.core import FRAME_S, OUTPUT_RATE_HZ, AudioDelta, TranscriptDelta, TurnDone
from sglang_live.errors import StageFailedError

from .fakes import ask, user

pytestmark = pytest.mark.usefixtures("must_not_hang")


@pytest.fixture
async def world(world_of):
    return await world_of(reply=(5, 6, 70), has_talker=False, policies=("truncate",))


@pytest.fixture
async def session(world):
    return await world.orchestrator.open_session("session")


async def answer(session, turn) -> list:
    return [event async for event in session.respond(turn)]


async def test_the_text_is_read_and_tokens_are_marked_in_its_sound(world, session):
    events = await answer(session, ask("t1", user("u1", "hello")))
    text = "".join(event.text for event in events if isinstance(event, TranscriptDelta))
    assert "".join(world.vocoder.texts) == text == " 5 6 70"
    audio = [event for event in events if isinstance(event, AudioDelta)]
    samples = np.frombuffer(b"".join(event.pcm for event in audio), "<i2").tolist()
    assert samples == [1, 1, 2, 2, 3, 3, 3]
    marks = [mark for event in audio for mark in event.spoken]
    assert marks == [(n, pytest.approx(at / OUTPUT_RATE_HZ)) for n, at in ((1, 2), (2, 4), (3, 7))]
    done = events[-1]
    assert isinstance(done, TurnDone) and done.status == "completed" and done.spoken
    assert done.item.token_ids == (5, 6, 70)
    assert done.n_frames == round(7 / OUTPUT_RATE_HZ / FRAME_S)


async def test_without_audio_nothing_is_read(world, session):
    events = await answer(session, ask("t1", user("u1", "hello"), wants_audio=False))
    assert world.vocoder.texts == [] and world.vocoder.openers == []
    assert isinstance(events[-1], TurnDone)


async def test_the_voice_is_the_turns(world, session):
    await answer(session, ask("t1", user("u1", "hello"), voice="anna"))
    assert world.vocoder.openers[0].voice == "anna"


async def test_an_interruption_ends_the_reading(world, session):
    world.vocoder.holds_at = 1
    events: list = []

    async def listen() -> None:
        async for event in session.respond(ask("t1", user("u1", "hello"))):
            events.append(event)

    listening = asyncio.create_task(listen())
    while not any(isinstance(event, AudioDelta) for event in events):
        await asyncio.sleep(0.01)
    assert session.interrupt()
    await listening
    assert events[-1].status == "interrupted" and not events[-1].spoken
    await asyncio.sleep(0.05)
    assert len(world.vocoder.cancelled) == 1


async def test_a_voice_that_fails_fails_the_turn_and_the_session_goes_on(world, session):
    world.vocoder.fails_at = 1
    with pytest.raises(StageFailedError):
        await answer(session, ask("t1", user("u1", "hello")))
    world.vocoder.fails_at = None
    assert isinstance((await answer(session, ask("t2", user("u2", "again"))))[-1], TurnDone)
