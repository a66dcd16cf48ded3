"""Turns of a talker that reads the response's text instead of the thinker's tokens."""

import numpy as np
import pytest

from sglang_live.core import AudioDelta, TurnDone

from .fakes import ask, user

pytestmark = pytest.mark.usefixtures("must_not_hang")


@pytest.fixture
async def world(world_of):
    return await world_of(reply=(5, 6, 70), talker_reads_text=True)


@pytest.fixture
async def session(world):
    return await world.orchestrator.open_session("session")


async def answer(session, turn) -> list:
    return [event async for event in session.respond(turn)]


async def test_the_talker_gets_the_text_and_no_user_messages(world, session):
    events = await answer(session, ask("t1", user("u1", "hear this:", 800), voice="anna"))
    [request] = world.talker.openers
    assert (request.first_id, request.voice) == (None, "anna")
    assert request.segment_keys == request.segments == []
    pcm = b"".join(event.pcm for event in events if isinstance(event, AudioDelta))
    assert np.frombuffer(pcm, "<i2").tolist() == [5, 6, 70]
    done = events[-1]
    assert isinstance(done, TurnDone) and done.status == "completed" and done.spoken
    assert done.item.token_ids == (5, 6, 70) and done.n_frames == 3


async def test_the_next_turn_needs_no_messages_either(world, session):
    await answer(session, ask("t1", user("u1", "hello")))
    events = await answer(session, ask("t2", user("u1", "hello"), user("u2", "and now?")))
    assert world.talker.openers[1].segment_keys == [] and world.talker.needed == []
    assert events[-1].status == "completed"


async def test_without_audio_nothing_is_spoken(world, session):
    events = await answer(session, ask("t1", user("u1", "hello"), wants_audio=False))
    assert world.talker.openers == [] and isinstance(events[-1], TurnDone)


async def test_a_response_without_text_is_spoken_by_no_talker(world_of):
    world = await world_of(reply=(), talker_reads_text=True)
    session = await world.orchestrator.open_session("session")
    events = await answer(session, ask("t1", user("u1", "hello")))
    assert world.talker.openers == [] and world.vocoder.openers == []
    assert events[-1].spoken and events[-1].n_frames == 0


async def test_the_talkers_marks_come_with_the_sound_and_its_frames_may_have_another_length(
    world, session
):
    world.talker.frame_s = 0.2
    events = await answer(session, ask("t1", user("u1", "hello")))
    marks = [mark for event in events if isinstance(event, AudioDelta) for mark in event.spoken]
    assert marks == [(1, 0.2), (2, 0.4), (3, pytest.approx(0.6))]
    # Frames of 80 ms, as every model's are counted.
    assert events[-1].n_frames == round(3 * 0.2 / 0.08)
