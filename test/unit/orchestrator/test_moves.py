"""A turn whose stage dies goes on in another replica, and is what it is without that."""

import asyncio
import itertools
from dataclasses import replace

import msgspec
import pytest

from sglang_live.core import AudioDelta, TurnDone
from sglang_live.errors import StageUnavailableError
from sglang_live.orchestrator.suspects import SuspectError
from sglang_live.stages.transport.queues import WINDOW

from .fakes import ask, user
from .test_turns import answer, sound, transcript

pytestmark = pytest.mark.usefixtures("must_not_hang")

STAGES = ["thinker", "talker", "vocoder"]
REPLY = [5, 6, 7, 8, 9]
TURN = ask("t1", user("u1", "hi", 300))
# Each stage dies before its n-th token, frame or sound; with 5 it has made all of them.
DEATHS = list(itertools.product(STAGES, range(6)))


def replicas_of(world, stage: str) -> list:
    return getattr(world, f"{stage}s")


def lost_jobs(world) -> dict[tuple[str, str], int]:
    return dict(world.orchestrator.lost_jobs.n)


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0.001)


class Dying:
    """Replicas of a stage, each of which stops where the test says, until it is killed."""

    def __init__(self, world, stage: str, *at: int):
        self._world = world
        self._at = dict(zip(replicas_of(world, stage), at, strict=False))
        for replica, n in self._at.items():
            replica.holds_at = n

    async def kill(self) -> None:
        for replica in self._at:
            await until(lambda replica=replica: replica.held)
            await self._world.settled()  # what it has sent has come
            await self._world.process(replica).stop()


def told(events: list) -> tuple:
    """All that a turn has told: text, sound and its marks, and its end."""
    done = events[-1]
    assert isinstance(done, TurnDone)
    marks = [mark for event in events if isinstance(event, AudioDelta) for mark in event.spoken]
    said = done.item.token_ids, [part.text for part in done.item.parts]
    end = done.status, done.usage, done.n_frames, done.spoken, done.function_calls
    return transcript(events), sound(events), marks, said, end


async def undisturbed(world_of, **world) -> tuple:
    world = await world_of(reply=REPLY, **world)
    session = await world.orchestrator.open_session("undisturbed")
    return told(await answer(session, TURN))


@pytest.mark.parametrize(("stage", "at"), DEATHS)
async def test_a_turn_is_as_if_its_replica_had_not_died(world_of, stage, at):
    world = await world_of(reply=REPLY, n_replicas=2)
    session = await world.orchestrator.open_session("one")
    dying = Dying(world, stage, at)
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    assert told(await running) == await undisturbed(world_of)
    assert lost_jobs(world) == {(stage, "moved"): 1}
    assert [len(replica.openers) for replica in replicas_of(world, stage)] == [1, 1]
    await session.close()
    await world.settled()
    assert world.n_jobs() == 0


@pytest.mark.parametrize("stage", STAGES)
async def test_a_long_turn_moves_through_windows_of_every_stage_whole(world_of, stage):
    reply = [n % 30_000 for n in range(5 * WINDOW)]
    world = await world_of(reply, n_replicas=2)
    session = await world.orchestrator.open_session("one")
    dying = Dying(world, stage, 3 * WINDOW + 1)
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    events = await running
    assert sound(events) == reply and events[-1].item.token_ids == tuple(reply)


@pytest.mark.parametrize("at", range(6))
async def test_a_voice_that_reads_text_reads_on_in_another_replica(world_of, at):
    world = await world_of(reply=REPLY, n_replicas=2, has_talker=False)
    session = await world.orchestrator.open_session("one")
    dying = Dying(world, "vocoder", at)
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    assert told(await running) == await undisturbed(world_of, has_talker=False)
    assert [len(vocoder.texts) for vocoder in world.vocoders] == [at, 5 - at]


@pytest.mark.parametrize(("stage", "at"), [("thinker", 0), ("thinker", 1), ("talker", 1)])
async def test_text_that_is_given_is_told_and_spoken_once(world_of, stage, at):
    turn = ask("t1", user("u1", "5 6 7"), script="5 6 7", stateless=True)
    world = await world_of(n_replicas=2)
    session = await world.orchestrator.open_session("one")
    dying = Dying(world, stage, at)
    running = asyncio.create_task(answer(session, turn))
    await dying.kill()
    events = await running
    assert (transcript(events), sound(events)) == ("5 6 7", [5, 6, 7])
    assert lost_jobs(world) == {(stage, "moved"): 1}


@pytest.mark.parametrize("at", [None, 0, 1, 2])
async def test_a_transcript_that_the_thinker_writes_is_whole(world_of, at):
    turn = ask("t1", user("u1", "5 6 7"), wants_audio=False, stateless=True, transcribes=True)
    world = await world_of(reply=REPLY, n_replicas=2)
    session = await world.orchestrator.open_session("one")
    running = asyncio.create_task(answer(session, turn))
    if at is not None:
        await Dying(world, "thinker", at).kill()
    events = await running
    assert transcript(events).split() == [str(n) for n in REPLY]
    assert events[-1].item.token_ids == tuple(REPLY)


@pytest.mark.parametrize("at", range(4))
async def test_a_talker_that_reads_text_speaks_on_in_another_replica(world_of, at):
    turn = ask("t1", user("u1", "5 6 7"), script="5 6 7")
    alone = {"has_thinker": False, "talker_reads_text": True}
    events = []
    for n_replicas in (1, 2):
        world = await world_of(n_replicas=n_replicas, **alone)
        session = await world.orchestrator.open_session("one")
        running = asyncio.create_task(answer(session, turn))
        if n_replicas == 2:
            await Dying(world, "talker", at).kill()
        events.append(told(await running))
    assert events[0] == events[1]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_turn_moves_once(world_of, stage):
    world = await world_of(reply=REPLY, n_replicas=3)
    session = await world.orchestrator.open_session("one")
    dying = Dying(world, stage, 2, 3)
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    with pytest.raises(StageUnavailableError):
        await running
    assert lost_jobs(world) == {(stage, "moved"): 1, (stage, "moved_before"): 1}
    turn = replace(TURN, turn_id="t2")
    assert told(await answer(session, turn))[:2] == (await undisturbed(world_of))[:2]


@pytest.mark.parametrize("stages", list(itertools.combinations(STAGES, 2)), ids="+".join)
async def test_a_turn_goes_on_when_a_host_with_several_stages_dies(world_of, stages):
    world = await world_of(reply=REPLY, n_replicas=2)
    session = await world.orchestrator.open_session("one")
    at = {"thinker": 3, "talker": 2, "vocoder": 1}
    dying = [Dying(world, stage, at[stage]) for stage in stages]
    running = asyncio.create_task(answer(session, TURN))
    for one in dying:
        await one.kill()
    assert told(await running) == await undisturbed(world_of)
    assert lost_jobs(world) == {(stage, "moved"): 1 for stage in stages}


async def test_the_loss_of_a_second_host_ends_the_turn(world_of):
    world = await world_of(reply=REPLY, n_replicas=2)
    for stage, host in (("talker", "a"), ("vocoder", "b")):
        entry = world.process(replicas_of(world, stage)[0]).entry
        entry.spec = msgspec.structs.replace(entry.spec, address=f"tcp://{host}:1")
    session = await world.orchestrator.open_session("one")
    dying = [Dying(world, stage, at) for stage, at in (("talker", 2), ("vocoder", 1))]
    running = asyncio.create_task(answer(session, TURN))
    for one in dying:
        await one.kill()
    with pytest.raises(StageUnavailableError):
        await running
    assert lost_jobs(world) == {("talker", "moved"): 1, ("vocoder", "moved_before"): 1}


@pytest.mark.parametrize("stage", STAGES)
async def test_without_another_replica_the_turn_fails(world_of, stage):
    world = await world_of(reply=REPLY)
    session = await world.orchestrator.open_session("one")
    dying = Dying(world, stage, 2)
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    with pytest.raises(StageUnavailableError, match=f"{stage}/0"):
        await running
    assert lost_jobs(world) == {(stage, "no_replica"): 1}


@pytest.mark.parametrize("stage", STAGES)
async def test_content_that_killed_twice_does_not_move(world_of, stage):
    world = await world_of(reply=REPLY, n_replicas=2)
    session = await world.orchestrator.open_session("one")
    dying, suspects = Dying(world, stage, 2), world.orchestrator.suspects
    running = asyncio.create_task(answer(session, TURN))
    replica = replicas_of(world, stage)[0]
    await until(lambda: replica.held)
    for _ in range(2):
        suspects.died(f"{stage}/0", world.process(replica).entry.client.unfinished())
    await dying.kill()
    with pytest.raises(StageUnavailableError):
        await running
    assert lost_jobs(world) == {(stage, "suspect"): 1}
    assert replicas_of(world, stage)[1].openers == []
    with pytest.raises(SuspectError):
        await answer(session, replace(TURN, turn_id="t2"))


@pytest.mark.parametrize("stage", STAGES)
async def test_a_turn_that_kills_two_replicas_is_refused_then(world_of, stage):
    world = await world_of(reply=REPLY, n_replicas=3)
    session = await world.orchestrator.open_session("one")
    dying, suspects = Dying(world, stage, 2, 3), world.orchestrator.suspects
    running = asyncio.create_task(answer(session, TURN))
    for replica in replicas_of(world, stage)[:2]:
        await until(lambda replica=replica: replica.held)
        entry = world.process(replica).entry
        suspects.died(entry.name, entry.client.unfinished())
        await world.process(replica).stop()
    with pytest.raises(StageUnavailableError):
        await running
    with pytest.raises(SuspectError):
        await answer(session, replace(TURN, turn_id="t2"))
    assert suspects.n_suspected == 2 and dying


@pytest.mark.parametrize("at", range(6))
async def test_an_interruption_reaches_the_replica_to_which_the_thinker_moves(world_of, at):
    world = await world_of(reply=REPLY, n_replicas=2, policies=("truncate",))
    session = await world.orchestrator.open_session("one")
    dying, other = Dying(world, "thinker", at), world.thinkers[1]
    other.holds_at = at
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    await until(lambda: other.held)
    assert session.interrupt()
    events = await running
    assert events[-1].status == "interrupted"
    assert events[-1].item.token_ids == tuple(REPLY[:at])


@pytest.mark.parametrize("stage", STAGES)
async def test_an_interruption_before_the_move_ends_the_turn(world_of, stage):
    world = await world_of(reply=REPLY, n_replicas=2, policies=("truncate",))
    session = await world.orchestrator.open_session("one")
    dying = Dying(world, stage, 2)
    running = asyncio.create_task(answer(session, TURN))
    replica = replicas_of(world, stage)[0]
    await until(lambda: replica.held)
    await world.settled()
    entry = world.process(replica).entry
    entry.ready = None
    entry.client.fail_all("process ended")  # its jobs have not noticed it yet
    assert session.interrupt()
    events = await running
    assert events[-1].status == "interrupted" and dying
    n_said = len(events[-1].item.token_ids)
    assert events[-1].item.token_ids == tuple(REPLY[:n_said])
    assert (stage, "moved") in lost_jobs(world) if stage == "thinker" else not lost_jobs(world)
    await world.process(replica).stop()
    await world.settled()
    assert world.n_jobs() == 0


@pytest.mark.parametrize("stage", STAGES)
async def test_a_turn_that_is_closed_in_its_move_leaves_nothing(world_of, stage):
    world = await world_of(reply=REPLY, n_replicas=2)
    session = await world.orchestrator.open_session("one")
    dying = Dying(world, stage, 2)
    other = replicas_of(world, stage)[1]
    other.holds_at = 2
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    await until(lambda: other.held)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.settled()
    assert world.n_jobs() == 0
    other.holds_at = None
    assert transcript(await answer(session, replace(TURN, turn_id="t2"))) == " 5 6 7 8 9"


async def test_playback_is_reported_to_the_replica_to_which_a_job_moved(world_of):
    world = await world_of(reply=REPLY, n_replicas=2, policies=("urgency",))
    session = await world.orchestrator.open_session("one")
    dying, other = Dying(world, "thinker", 2), world.thinkers[1]
    other.holds_at = 3
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    await until(lambda: other.held)
    session.report_playback(0.5, True)
    await until(lambda: other.progress and other.progress[-1].heard_s == 0.5)
    other.release()
    await running


async def test_a_function_call_that_has_begun_fails_with_its_replica(world_of):
    world = await world_of(reply=REPLY, n_replicas=2)
    session = await world.orchestrator.open_session("one")
    world.thinkers[0].calls = True
    dying = Dying(world, "thinker", 2)
    running = asyncio.create_task(answer(session, TURN))
    await dying.kill()
    with pytest.raises(StageUnavailableError):
        await running
    assert lost_jobs(world) == {("thinker", "function_call"): 1}
