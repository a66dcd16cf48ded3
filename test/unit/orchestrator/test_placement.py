"""Sessions of a replica that is down are placed anew at their next turn; all others stay."""

import asyncio

import msgspec
import pytest

from sglang_live.errors import StageUnavailableError

from .fakes import ask, user
from .test_sessions import done

pytestmark = pytest.mark.usefixtures("must_not_hang")

STAGES = ["thinker", "talker", "vocoder"]


def replicas_of(world, stage: str) -> list:
    return getattr(world, f"{stage}s")


def sessions_of(world, stage: str) -> list[set[str]]:
    return [replica.sessions for replica in world.replicas if replica.spec.stage == stage]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_session_of_a_dead_replica_answers_its_next_turn_on_another(
    world_of, stage, caplog
):
    world = await world_of(n_replicas=2)
    one = await world.orchestrator.open_session("one")
    other = await world.orchestrator.open_session("other")
    for session in (one, other):
        await done(session, ask(f"{session.session_id}1", user("u1", "hi", 300)))
    dead, alive = replicas_of(world, stage)
    await world.process(dead).stop()
    n_before = len(alive.openers)
    history = (user("u1", "hi", 300), user("u2", "and"))
    assert (await done(one, ask("one2", *history))).status == "completed"
    assert len(alive.openers) == n_before + 1
    if stage == "thinker":
        told = alive.openers[-1]
        assert [item.key for item in told.items] == told.keys == ["u1", "u2"], "the whole history"
    if stage == "talker":
        assert [segment.key for segment in alive.openers[-1].segments] == ["u1", "u2"]
    for name in STAGES:
        where = [set(), {"one", "other"}] if name == stage else [{"one"}, {"other"}]
        assert sessions_of(world, name) == where
    left = {r.name: r.n_left for r in world.replicas if r.n_left}
    assert left == {f"{stage}/0": 1}
    [line] = [r.getMessage() for r in caplog.records if "session_placed" in r.getMessage()]
    assert line == f"session_placed session=one from={stage}/0 to={stage}/1"


async def test_a_session_that_was_placed_anew_stays_there(world_of):
    world = await world_of(n_replicas=2)
    session = await world.orchestrator.open_session("one")
    await world.process(world.thinkers[0]).stop()
    await done(session, ask("t1", user("u1", "hi")))
    await world.process(world.thinkers[0]).start()
    await done(session, ask("t2", user("u1", "hi"), user("u2", "and")))
    assert [len(thinker.openers) for thinker in world.thinkers] == [0, 2]
    await session.close()
    await world.settled()
    assert [thinker.closed_sessions for thinker in world.thinkers] == [[], ["one"]]
    assert all(not replica.sessions for replica in world.replicas)


async def test_a_host_that_was_cut_off_is_to_close_the_sessions_that_have_left_it(world_of):
    world = await world_of(n_replicas=2)
    session = await world.orchestrator.open_session("one")
    await done(session, ask("t1", user("u1", "hi")))
    lost = world.process(world.thinkers[0]).entry
    lost.spec = msgspec.structs.replace(lost.spec, remote=True)
    await world.process(world.thinkers[0]).stop()
    await done(session, ask("t2", user("u1", "hi"), user("u2", "and")))
    assert {r.name: r.to_close for r in world.replicas if r.to_close} == {"thinker/0": {"one"}}


async def test_a_replica_that_is_back_before_the_next_turn_keeps_its_sessions(world_of):
    world = await world_of(n_replicas=2)
    session = await world.orchestrator.open_session("one")
    await done(session, ask("t1", user("u1", "hi")))
    await world.process(world.thinkers[0]).restart()
    await done(session, ask("t2", user("u1", "hi"), user("u2", "and")))
    assert [len(thinker.openers) for thinker in world.thinkers] == [2, 0]


async def test_a_turn_fails_with_the_only_replica_and_the_next_one_is_answered(world_of):
    world = await world_of()
    session = await world.orchestrator.open_session("one")
    world.talkers[0].holds_at = 1
    running = asyncio.create_task(done(session, ask("t1", user("u1", "hi"))))
    await world.settled()
    await world.process(world.talkers[0]).stop()
    with pytest.raises(StageUnavailableError):
        await running
    world.talkers[0].holds_at = None
    await world.process(world.talkers[0]).start()
    assert (await done(session, ask("t2", user("u1", "hi")))).status == "completed"


@pytest.mark.parametrize("stage", STAGES)
async def test_with_all_replicas_down_turns_fail_clearly_until_one_is_back(world_of, stage):
    world = await world_of(n_replicas=2)
    session = await world.orchestrator.open_session("one")
    for replica in replicas_of(world, stage):
        await world.process(replica).stop()
    for n in range(2):
        with pytest.raises(StageUnavailableError) as failed:
            await done(session, ask(f"t{n}", user("u1", "hi")))
        assert failed.value.retry_after_s
    with pytest.raises(StageUnavailableError, match=f"no {stage} is up"):
        await world.orchestrator.open_session("new")
    await world.process(replicas_of(world, stage)[1]).start()
    assert (await done(session, ask("t3", user("u1", "hi")))).status == "completed"
    assert sessions_of(world, stage) == [set(), {"one"}]


async def test_stateless_turns_and_turn_prefill_go_where_the_session_is_placed(world_of):
    world = await world_of(n_replicas=2)
    session = await world.orchestrator.open_session("one")
    await world.process(world.thinkers[0]).stop()
    await done(session, ask("t1", user("u1", "hi"), stateless=True))
    ahead = ask("t2", user("u2", "hi"), prefill_only=True, preheat=True)
    assert session.prefill_turn(ahead)
    await done(session, ask("t3", user("u2", "hi")))
    assert [len(thinker.openers) for thinker in world.thinkers] == [0, 3]


async def test_the_sessions_of_a_dead_replica_are_spread_over_the_others(world_of):
    world = await world_of(n_replicas=3, max_sessions=12)
    sessions = [await world.orchestrator.open_session(f"s{n}") for n in range(12)]
    await world.process(world.thinkers[1]).stop()
    for session in sessions:
        await done(session, ask(f"{session.session_id}t", user("u1", "hi")))
    assert [len(one) for one in sessions_of(world, "thinker")] == [6, 0, 6]
    assert [len(one) for one in sessions_of(world, "talker")] == [4, 4, 4]


async def test_no_session_goes_to_a_full_replica_while_another_has_room(world_of):
    world = await world_of(n_replicas=2, policies=("admission",))
    kv = {"kv_tokens_total": 1000.0, "kv_tokens_used": 970.0}
    full, empty = (r for r in world.replicas if r.spec.stage == "talker")
    full.ready = msgspec.structs.replace(full.ready, load=kv)
    empty.ready = msgspec.structs.replace(empty.ready, load=kv | {"kv_tokens_used": 200.0})
    for n in range(3):
        world.clock.advance(2.0)
        assert world.orchestrator.capacity_now().n_more > 0
        await world.orchestrator.open_session(f"s{n}")
    assert [len(one) for one in sessions_of(world, "talker")] == [0, 3]
    assert world.orchestrator.capacity_now().pools["talker"][0] == 0.2


async def test_the_begin_of_a_function_call_reaches_admission(world_of):
    world = await world_of(policies=("admission",))
    session = await world.orchestrator.open_session("one")
    world.thinker.calls = True
    world.thinker.holds_at = 0
    running = asyncio.create_task(done(session, ask("t1", user("u1", "hi"))))
    await world.settled()
    world.clock.advance(60.0)
    assert world.orchestrator.capacity.report().share is None
    world.thinker.release()
    await running
