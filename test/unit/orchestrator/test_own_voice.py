"""Turns of a thinker that writes the codes of its speech: codes are heard, and not read."""

import asyncio
from dataclasses import replace

import pytest

from sglang_live.core import FRAME_S, AudioDelta
from sglang_live.orchestrator.stage_jobs import OwnVoiceJob
from sglang_live.orchestrator.turn_control import TurnControl
from sglang_live.policy.policies import ALL

from .fakes import ask, user
from .test_moves import Dying, told, until
from .test_turns import answer, sound, transcript

pytestmark = pytest.mark.usefixtures("must_not_hang")

REPLY = (5, 6, 101, 102, 103, 7, 104, 105)
CODES = [101, 102, 103, 104, 105]
TURN = ask("t1", user("u1", "hi", 300))


async def test_codes_go_to_the_vocoder_and_text_to_the_transcript(world_of):
    world = await world_of(reply=REPLY, own_voice=True)
    session = await world.orchestrator.open_session("session")
    events = await answer(session, TURN)
    assert (transcript(events), sound(events)) == (" 5 6 7", CODES)
    done = events[-1]
    # The history keeps the ids of both.
    assert done.item.token_ids == REPLY and done.item.parts[0].text == " 5 6 7"
    assert (done.status, done.spoken, done.n_frames) == ("completed", True, 5)
    assert (done.usage.output_text_tokens, done.usage.output_audio_tokens) == (3, 5)


async def test_each_frame_is_marked_with_the_ids_up_to_it(world_of):
    world = await world_of(reply=REPLY, own_voice=True)
    session = await world.orchestrator.open_session("session")
    events = await answer(session, TURN)
    marks = [mark for event in events if isinstance(event, AudioDelta) for mark in event.spoken]
    ids = [3, 4, 5, 7, 8]
    assert marks == [(n, pytest.approx(FRAME_S * (i + 1))) for i, n in enumerate(ids)]


async def test_usage_counts_codes_however_short_they_are(world_of):
    world = await world_of(reply=REPLY, own_voice=True)
    world.thinker.code_s = FRAME_S / 2
    session = await world.orchestrator.open_session("session")
    done = (await answer(session, TURN))[-1]
    assert (done.usage.output_text_tokens, done.usage.output_audio_tokens) == (3, 5)


async def test_without_audio_nothing_is_decoded(world_of):
    world = await world_of(reply=REPLY, own_voice=True)
    session = await world.orchestrator.open_session("session")
    events = await answer(session, replace(TURN, wants_audio=False))
    assert world.vocoder.openers == [] and transcript(events) == " 5 6 7"


@pytest.mark.parametrize("stage", ["thinker", "vocoder"])
@pytest.mark.parametrize("at", range(6))
async def test_a_turn_is_as_if_its_replica_had_not_died(world_of, stage, at):
    world = await world_of(reply=REPLY, n_replicas=2, own_voice=True)
    session = await world.orchestrator.open_session("one")
    dying = Dying(world, stage, at)
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    lone = await world_of(reply=REPLY, own_voice=True)
    other = await lone.orchestrator.open_session("undisturbed")
    assert told(await running) == told(await answer(other, TURN))


async def test_a_turn_that_another_server_goes_on_with_sounds_from_the_beginning(world_of):
    world = await world_of(reply=REPLY, own_voice=True)
    world.thinker.holds_at = 4
    session = await world.orchestrator.open_session("s", epoch=1)
    running = asyncio.create_task(answer(session, TURN))
    await until(lambda: world.thinker.held)
    await world.settled()
    begun = session.begun()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert begun is not None and begun.ids == REPLY[:4]
    world.thinker.holds_at = None
    other = await world.orchestrator.open_session("s2", epoch=2)
    events = await answer(other, replace(TURN, begun=begun))
    assert (transcript(events), sound(events)) == (" 7", CODES)
    assert events[-1].usage.output_audio_tokens == 5


async def test_an_interrupted_turn_keeps_the_ids_that_were_generated(world_of):
    world = await world_of(reply=REPLY, own_voice=True, policies=("truncate",))
    world.thinker.holds_at = 4
    session = await world.orchestrator.open_session("session")
    running = asyncio.create_task(answer(session, TURN))
    await until(lambda: world.thinker.held)
    await world.settled()
    assert session.interrupt()
    done = (await running)[-1]
    assert (done.status, done.item.token_ids) == ("interrupted", REPLY[:4])


class FakeThinkerJob:
    def __init__(self):
        self.told: list[tuple[float, bool]] = []

    def report(self, heard_s: float, advancing: bool, speed: float = 1.0) -> None:
        self.told.append((heard_s, advancing))


def test_the_thinker_hears_of_playback_alone():
    control, thinker = TurnControl(ALL, None), FakeThinkerJob()
    control.attach(thinker, OwnVoiceJob(TURN), None)
    for n in range(20):
        control.frames_came(n)
    assert thinker.told == []
    control.heard(0.5, True)
    assert thinker.told == [(0.5, True)]
