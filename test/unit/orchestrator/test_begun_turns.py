"""A turn that another server has begun, with the same stages, goes on where that one was."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from sglang_live.capacity.control import CapacityConfig, CapacityControl
from sglang_live.core import BegunTurn, TranscriptDelta, TurnDone
from sglang_live.orchestrator.sessions import Orchestrator
from sglang_live.orchestrator.stage_jobs import seed_of
from sglang_live.policy.policies import OFF
from sglang_live.stages.supervisor import Replica
from sglang_live.stages.transport.client import StageClient

from .fakes import FakeWorld, ask, user
from .test_moves import REPLY, STAGES, replicas_of, until
from .test_turns import answer, sound, transcript

pytestmark = pytest.mark.usefixtures("must_not_hang")

TURN = ask("t1", user("u1", "hi", 300), user("u2", "and"))
# The first server is lost before the n-th token, frame or sound; with 5 all of them are made.
LOSSES = list(itertools.product(STAGES, range(6)))


class OtherServer:
    """An orchestrator of its own, with connections of its own to the stages of a world."""

    def __init__(self, world: FakeWorld):
        self.replicas = [
            Replica(
                entry.spec,
                client=StageClient(entry.spec.name, entry.spec.address, same_host=True),
                ready=entry.ready,
            )
            for entry in world.replicas
        ]
        self.orchestrator = Orchestrator(
            self,
            model_name="fake",
            voices=("ethan",),
            capacity=CapacityControl(
                CapacityConfig(max_sessions=8), world.clock, lambda: self.orchestrator.pools()
            ),
            policies=OFF,
            clock=world.clock,
        )

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.client.close()


async def lost_in(world: FakeWorld, stage: str, at: int, session_id: str = "s"):
    """A server that is lost in the middle of a turn: its session, what it has told, its task."""
    replica = replicas_of(world, stage)[0]
    replica.holds_at = at
    session = await world.orchestrator.open_session(session_id, epoch=1)
    events: list = []

    async def listen() -> None:
        async for event in session.respond(TURN):
            events.append(event)

    running = asyncio.create_task(listen())
    await until(lambda: replica.held)
    await world.settled()
    return session, events, running


@pytest.mark.parametrize(("stage", "at"), LOSSES)
async def test_the_turn_is_as_if_its_server_had_not_been_lost(world_of, stage, at):
    world = await world_of(reply=REPLY)
    session, told, running = await lost_in(world, stage, at)
    begun = session.begun()
    assert begun is not None and begun.said == transcript(told)
    assert begun.seed == seed_of(TURN)
    replicas_of(world, stage)[0].holds_at = None
    other = OtherServer(world)
    again = await other.orchestrator.open_session("s", epoch=2, at=session.addresses)
    again.restore(TURN.history, session.n_turns)
    events = await answer(again, replace(TURN, turn_id="", begun=begun))
    done = events[-1]
    assert isinstance(done, TurnDone) and done.item.token_ids == tuple(REPLY)
    assert transcript(told) + transcript(events) == "".join(f" {n}" for n in REPLY)
    assert sound(events) == REPLY, "the gateway leaves out what was heard"
    # Nothing was sent twice, and the jobs of the lost server have ended.
    assert all(not opener.items for opener in world.thinker.openers[1:])
    assert all(not opener.segments for opener in world.talker.openers[1:])
    # Of what the thinker told the lost server, the talker has what it began with.
    assert world.talker.needed == ([["u1", "u2"]] if (stage, at) == ("thinker", 0) else [])
    assert [opener.seed for opener in world.talker.openers[-1:]] == [begun.seed]
    for one in world.replicas:
        server = world.process(replicas_of(world, one.spec.stage)[0]).server
        assert all(
            job.opener.epoch != 1 for job in server._jobs.values() if hasattr(job.opener, "epoch")
        )
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await session.close()
    await world.settled()  # its last words are refused
    assert world.thinker.closed_sessions == world.talker.closed_sessions == []
    await again.close()
    for replica in other.replicas:
        await replica.client.ping(5.0)
    assert world.thinker.closed_sessions == world.talker.closed_sessions == ["s"]
    await other.close()


async def test_a_talker_that_has_lost_its_messages_goes_on_without_the_older_ones(world_of):
    world = await world_of(reply=REPLY)
    session, _, running = await lost_in(world, "talker", 2)
    begun = session.begun()
    world.talker.items.clear()
    world.talker.holds_at = None
    other = OtherServer(world)
    again = await other.orchestrator.open_session("s", epoch=2)
    again.restore(TURN.history, session.n_turns)
    events = await answer(again, replace(TURN, turn_id="", begun=begun))
    assert sound(events) == REPLY
    assert world.talker.needed == [["u1", "u2"]]
    assert world.talker.openers[-1].segment_keys == []
    # The next message is a new one, of which the thinker tells.
    history = (*TURN.history, events[-1].item, user("u3", "more"))
    await answer(again, replace(TURN, turn_id="", history=history))
    assert world.talker.openers[-1].segment_keys == ["u3"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await other.close()


async def test_stages_that_have_lost_everything_get_everything(world_of):
    world = await world_of(reply=REPLY)
    begun = BegunTurn(ids=(5, 6), said=" 5 6", seed=1)
    other = OtherServer(world)
    session = await other.orchestrator.open_session("s", epoch=2)
    session.restore(TURN.history, 1)
    events = await answer(session, replace(TURN, turn_id="", begun=begun))
    assert sound(events) == REPLY and transcript(events) == " 7 8 9"
    # The talker begins at once, and is answered when the thinker has prefilled.
    assert world.talker.needed == [["u1", "u2"]]
    assert [opener.segment_keys for opener in world.talker.openers] == [["u1", "u2"]]
    assert [*world.talker.items["s"]] == ["u1", "u2"]
    await other.close()


async def test_a_thinker_that_has_lost_its_items_gets_all_of_them(world_of):
    world = await world_of(reply=REPLY)
    other = OtherServer(world)
    session = await other.orchestrator.open_session("s", epoch=2, at={"thinker": "tcp://gone:1"})
    session.restore(TURN.history, 7)
    assert session.n_turns == 7
    events = await answer(session, replace(TURN, turn_id=""))
    assert events[-1].item.key == "response-s.00000008"
    assert [len(opener.items) for opener in world.thinker.openers] == [0, 2]
    assert world.talker.openers[-1].segment_keys == ["u1", "u2"]
    await other.close()


async def test_a_session_goes_where_its_kv_is(world_of):
    world = await world_of(n_replicas=3)
    first = await world.orchestrator.open_session("s", epoch=1)
    at = {stage: address.replace("-0-", "-2-") for stage, address in first.addresses.items()}
    await first.close()
    again = await world.orchestrator.open_session("s", epoch=2, at=at)
    assert again.addresses == at
    third = next(r for r in world.replicas if r.spec.address == at["thinker"])
    third.ready = None
    await again.close()
    later = await world.orchestrator.open_session("s", epoch=3, at=at)
    assert later.addresses["thinker"] != at["thinker"]
    assert later.addresses["talker"] == at["talker"]


async def test_a_turn_of_a_voice_that_reads_begins_anew_behind_its_text(world_of):
    world = await world_of(reply=REPLY, has_talker=False)
    session = await world.orchestrator.open_session("s", epoch=1)
    begun = BegunTurn(ids=(5, 6), said=" 5 6", seed=1)
    events = await answer(session, replace(TURN, begun=begun))
    assert transcript(events) == " 7 8 9"
    assert "".join(world.vocoder.texts) == " 5 6 7 8 9"
    deltas = [event for event in events if isinstance(event, TranscriptDelta)]
    assert [delta.n_tokens for delta in deltas] == [3, 4, 5]
