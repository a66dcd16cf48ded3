"""Sessions: how many, on which replicas, and what closing one does."""

import asyncio
import logging
import math
from dataclasses import replace

import msgspec
import pytest

from sglang_live.core import AudioDelta, PromptContent, PromptSize, TurnDone
from sglang_live.errors import (
    BadInputError,
    CapacityError,
    LiveError,
    StageFailedError,
    StageUnavailableError,
)
from sglang_live.kv.retention import RetentionConfig
from sglang_live.messages import PROMPT_TOKENS_MOST

from .fakes import ask, user

pytestmark = pytest.mark.usefixtures("must_not_hang")


async def done(session, turn) -> TurnDone:
    events = [event async for event in session.respond(turn)]
    return events[-1]


async def test_a_full_server_refuses_and_a_closed_session_makes_room(world_of):
    orchestrator = (await world_of(max_sessions=2)).orchestrator
    first = await orchestrator.open_session("one")
    await orchestrator.open_session("two")
    with pytest.raises(CapacityError, match="2 of 2 sessions") as caught:
        await orchestrator.open_session("three")
    assert caught.value.retry_after_s > 0
    await first.close()
    await orchestrator.open_session("three")
    assert len(orchestrator.sessions) == 2


async def test_a_session_id_is_taken_until_its_session_closes(world):
    session = await world.orchestrator.open_session("session")
    with pytest.raises(BadInputError, match="exists already"):
        await world.orchestrator.open_session("session")
    await session.close()
    await world.orchestrator.open_session("session")


async def test_new_sessions_go_where_the_fewest_are(world_of):
    world = await world_of(n_replicas=3)
    sessions = [await world.orchestrator.open_session(f"s{n}") for n in range(6)]
    assert [len(replica.sessions) for replica in world.replicas] == [2] * 9
    for session in (sessions[1], sessions[4]):  # both on the second replica of every stage
        await session.close()
    assert [len(replica.sessions) for replica in world.replicas] == [2, 0, 2] * 3
    await world.orchestrator.open_session("new")
    assert [len(replica.sessions) for replica in world.replicas] == [2, 1, 2] * 3


async def test_a_session_stays_with_its_replicas(world_of):
    world = await world_of(n_replicas=2)
    one = await world.orchestrator.open_session("one")
    other = await world.orchestrator.open_session("other")
    for n in range(3):
        await done(one, ask(f"one{n}", user("u1", "hi")))
        await done(other, ask(f"other{n}", user("u1", "hi")))
    for stages in (world.thinkers, world.talkers):
        assert [{opener.session_id for opener in s.openers} for s in stages] == [{"one"}, {"other"}]
    assert [len(stage.openers) for stage in world.vocoders] == [3, 3]


async def test_a_replica_that_is_down_gets_no_new_session(world_of):
    world = await world_of(n_replicas=2)
    await world.process(world.talkers[0]).stop()
    for name in ("one", "other"):
        await done(await world.orchestrator.open_session(name), ask(name, user("u1", "hi")))
    assert len(world.talkers[1].openers) == 2


@pytest.mark.parametrize("stage", ["thinker", "talker", "vocoder"])
async def test_without_a_stage_no_session_opens(world, stage):
    await world.process(getattr(world, stage)).stop()
    with pytest.raises(StageUnavailableError, match=f"no {stage} is up") as caught:
        await world.orchestrator.open_session("session")
    assert caught.value.retry_after_s > 0
    assert not world.orchestrator.sessions
    assert all(not replica.sessions for replica in world.replicas)


async def test_closing_a_session_closes_it_in_every_stage_that_has_it(world):
    session = await world.orchestrator.open_session("session")
    await done(session, ask("t1", user("u1", "hi", 300)))
    await session.close()
    await session.close()
    await world.settled()
    assert [stage.closed_sessions for stage in world.stages] == [["session"]] * 3
    assert all(stage.items == {} for stage in world.stages)


async def test_closing_a_session_sends_nothing_to_a_stage_that_restarted_or_is_down(world):
    session = await world.orchestrator.open_session("session")
    await done(session, ask("t1", user("u1", "hi")))
    await world.process(world.talker).restart()
    await world.process(world.vocoder).stop()
    await session.close()
    await world.settled()
    assert [stage.closed_sessions for stage in world.stages] == [["session"], [], []]


async def test_a_closed_session_runs_no_turn(world):
    session = await world.orchestrator.open_session("session")
    await session.close()
    with pytest.raises(BadInputError, match="closed"):
        await done(session, ask("t1", user("u1", "hi")))


async def test_one_turn_at_a_time(world):
    session = await world.orchestrator.open_session("session")
    world.thinker.holds_at = 1
    running = session.respond(ask("t1", user("u1", "hi")))
    await anext(running)
    with pytest.raises(BadInputError, match="runs a turn already"):
        await done(session, ask("t2", user("u1", "hi")))
    await running.aclose()
    world.thinker.holds_at = None
    assert (await done(session, ask("t3", user("u1", "hi")))).status == "completed"


async def test_a_failed_turn_does_not_leave_the_session_busy(world):
    session = await world.orchestrator.open_session("session")
    world.thinker.fails_at = 0
    for n in range(2):
        with pytest.raises(Exception, match="thinker is full"):
            await done(session, ask(f"t{n}", user("u1", "hi")))
    world.thinker.fails_at = None
    assert (await done(session, ask("t3", user("u1", "hi")))).status == "completed"


# --- sessions of SGLang's own API ---

BOUND = RetentionConfig(sink_tokens=4, window_tokens=64, slack_tokens=8)


async def test_a_native_session_is_bounded_by_the_thinker_that_serves_it(world_of):
    world = await world_of(n_replicas=2)
    await world.orchestrator.retain_native("native", BOUND)
    [told] = world.thinker.openers
    bound = told.sink_tokens, told.window_tokens, told.slack_tokens
    assert (told.session_id, bound) == ("native", (4, 64, 8))
    assert world.thinkers[1].openers == []
    await world.settled()
    assert world.n_jobs() == 0


async def test_a_bound_holds_only_once_the_thinker_confirms_it(world):
    world.thinker.holds_at = 0
    bounding = asyncio.create_task(world.orchestrator.retain_native("native", BOUND))
    await world.settled()
    assert len(world.thinker.openers) == 1
    assert not bounding.done()
    world.thinker.release()
    await bounding


async def test_a_bound_that_fails_is_an_error(world):
    world.thinker.fails_at = 0
    with pytest.raises(StageFailedError, match="thinker is full"):
        await world.orchestrator.retain_native("native", BOUND)


async def test_without_its_thinker_no_native_session_is_bounded(world):
    world.thinker.holds_at = 0
    bounding = asyncio.create_task(world.orchestrator.retain_native("native", BOUND))
    await world.settled()
    await world.process(world.thinker).stop()
    with pytest.raises(StageUnavailableError):
        await bounding
    with pytest.raises(StageUnavailableError):
        await world.orchestrator.retain_native("native", BOUND)


def verdict(world) -> float | None:
    """Of all deadlines since the last time."""
    world.clock.advance(60)
    return world.orchestrator.capacity.report().share


async def test_first_packets_and_gaps_are_reported_to_admission(world_of):
    world = await world_of(policies=("admission",))
    assert verdict(world) is None
    session = await world.orchestrator.open_session("session")
    await done(session, replace(ask("written", user("u1", "hi")), wants_audio=False))
    assert verdict(world) is None
    turn = session.respond(ask("spoken", user("u2", "hi")))
    async for event in turn:
        if isinstance(event, AudioDelta):
            session.report_underrun(0.2)
            session.report_underrun(0.3)
    assert verdict(world) == pytest.approx(3.0)
    await done(session, ask("spoken too", user("u3", "hi")))
    assert verdict(world) == 0.0


async def test_a_turn_that_was_closed_or_interrupted_has_no_deadline(world_of):
    world = await world_of(policies=("admission", "truncate"))
    session = await world.orchestrator.open_session("session")
    events = session.respond(ask("left", user("u1", "hi")))
    await anext(events)
    await events.aclose()
    assert verdict(world) is None


async def test_a_turn_that_fails_before_its_first_audio_counts_as_late(world_of):
    world = await world_of(policies=("admission",))
    session = await world.orchestrator.open_session("session")
    await world.process(world.talker).stop()
    with pytest.raises(LiveError):
        await done(session, ask("fails", user("u1", "hi")))
    assert verdict(world) == math.inf


async def test_a_closed_session_makes_room_once(world_of):
    world = await world_of(policies=("admission",))
    session = await world.orchestrator.open_session("session")
    assert world.orchestrator.capacity_now().n_sessions == 1
    await session.close()
    await session.close()
    assert world.orchestrator.capacity_now().n_sessions == 0


async def test_a_session_that_finds_no_stage_takes_no_room(world_of):
    world = await world_of(max_sessions=1)
    await world.process(world.talker).stop()
    with pytest.raises(StageUnavailableError):
        await world.orchestrator.open_session("session")
    assert world.orchestrator.capacity_now().n_sessions == 0


# --- how long prompts are ---


def content(n_characters: int, **changes) -> PromptContent:
    return PromptContent.of([user("a", "x" * n_characters)], **changes)


async def test_a_thinker_measures_what_may_be_too_long_and_nothing_else(world):
    size = await world.orchestrator.measure(content(30, instructions="yy", functions=("z",)))
    assert size == PromptSize(header=3, items=30, most_header=750, most=1000)
    ready = world.replicas[0].ready
    world.replicas[0].ready = msgspec.structs.replace(ready, load={PROMPT_TOKENS_MOST: 100.0})
    world.thinker.openers.clear()
    assert await world.orchestrator.measure(content(50)) is None
    assert await world.orchestrator.measure(PromptContent(clips_s=(2.0,))) is None
    assert world.thinker.openers == []
    assert (await world.orchestrator.measure(content(51))).items == 51
    assert (await world.orchestrator.measure(PromptContent(clips_s=(3.0,)))).items == 3
    assert (await world.orchestrator.measure(PromptContent(texts=("é" * 26,)))).items == 26
    assert world.n_jobs() == 0


async def test_a_thinker_that_fails_to_measure_raises(world):
    world.thinker.fails_at = 0
    with pytest.raises(StageFailedError):
        await world.orchestrator.measure(content(30))
    await world.process(world.thinker).stop()
    with pytest.raises(StageUnavailableError):
        await world.orchestrator.measure(content(30))
    assert world.n_jobs() == 0


def test_texts_of_a_message_without_audio_between_them_are_one():
    item = user("a", "x", "y", 16_000, "z")
    other = user("b", 8_000)
    parts = PromptContent.of([item, other])
    assert (parts.texts, parts.clips_s, parts.n_characters) == (("xy", "z"), (1.0, 0.5), 3)


async def test_a_session_numbers_its_turns_with_ids_of_one_length(world, caplog):
    caplog.set_level(logging.INFO, "sglang_live.orchestrator")
    session = await world.orchestrator.open_session("sess_a")
    for n in range(2):
        await done(session, ask("", user(f"u{n}", "hi")))
    lines = [record.getMessage() for record in caplog.records]
    started = [line for line in lines if line.startswith("turn_started")]
    assert started == [
        "turn_started turn=sess_a.00000001 stateless=False",
        "turn_started turn=sess_a.00000002 stateless=False",
    ]
    assert sum(line.startswith("turn_done turn=sess_a.0000000") for line in lines) == 2
