"""Turns of a model without a thinker: it speaks the text that it is given."""

import numpy as np
import pytest

from sglang_live.core import AudioDelta, TranscriptDelta, TurnDone
from sglang_live.errors import CapacityError

from .fakes import FakeWorld, ask, user

pytestmark = pytest.mark.usefixtures("must_not_hang")


@pytest.fixture
async def world(world_of) -> FakeWorld:
    return await world_of(
        has_thinker=False, talker_reads_text=True, policies=("urgency", "truncate", "next-use")
    )


@pytest.fixture
async def session(world):
    return await world.orchestrator.open_session("session")


def script(text: str, **changes):
    return ask("", user("u1", text), script=text, **({"stateless": True} | changes))


async def test_the_talker_speaks_the_text_and_counts_its_tokens(world, session):
    events = [event async for event in session.respond(script("5 6 70", voice="anna"))]
    [request] = world.talker.openers
    assert (request.voice, request.first_id, request.segment_keys) == ("anna", None, [])
    pcm = b"".join(event.pcm for event in events if isinstance(event, AudioDelta))
    assert np.frombuffer(pcm, "<i2").tolist() == [5, 6, 70]
    assert [e.text for e in events if isinstance(e, TranscriptDelta)] == ["5 6 70"]
    done = events[-1]
    assert isinstance(done, TurnDone) and done.status == "completed" and done.spoken
    assert done.usage.input_text_tokens == 0
    assert (done.usage.output_text_tokens, done.usage.output_audio_tokens) == (3, 3)


async def test_a_session_ends_with_nothing_held(world, session):
    turn = session.respond(script("5 6", stateless=False))
    await anext(turn)
    session.report_playback(0.0, True)
    session.report_speech()
    session.report_next_use(1.0, None, None)
    assert session.interrupt()
    assert [event async for event in turn][-1].status == "interrupted"
    await session.close()
    await world.settled()
    assert world.n_jobs() == 0 and not world.orchestrator.sessions


async def test_a_talker_that_fails_fails_the_turn(world, session):
    world.talker.fails_at = 1
    with pytest.raises(Exception, match="talker is full") as failed:
        [event async for event in session.respond(script("5 6 70"))]
    assert not isinstance(failed.value, CapacityError) and failed.value.code == "stage_failed"
