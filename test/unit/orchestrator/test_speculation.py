"""Speculative turns: where they may begin, and that a withdrawn one is counted nowhere."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from sglang_live.capacity.deadlines import Kind
from sglang_live.core import OUTPUT_RATE_HZ, AudioDelta, AudioPart, HistoryItem, TurnDone
from sglang_live.errors import LiveError
from sglang_live.orchestrator.speculation import TurnWork

from .fakes import N_STATES, ask, user

pytestmark = pytest.mark.usefixtures("must_not_hang")


def piece(key: str, *, opens: bool = False, closes: bool = False) -> HistoryItem:
    audio = AudioPart(np.full(160, 7, np.int16))
    return HistoryItem(key=key, role="user", parts=(audio,), opens=opens, closes=closes)


def speculative(name: str, *history: HistoryItem):
    return replace(ask(name, *history), speculative=True)


async def done(session, turn) -> TurnDone:
    return [event async for event in session.respond(turn)][-1]


async def started(session, turn, world) -> asyncio.Task:
    """A turn whose thinker has stopped after its first token."""
    task = asyncio.create_task(done(session, turn))
    async with asyncio.timeout(30):
        while not any(opener.job_id == f"{turn.turn_id}-think" for opener in world.thinker.openers):
            await asyncio.sleep(0.01)
    return task


async def test_none_begins_while_another_listener_waits(world):
    world.thinker.holds_at = 1
    one = await world.orchestrator.open_session("one")
    other = await world.orchestrator.open_session("other")
    assert one.speculation_refused() == ""
    turn = await started(other, ask("t", user("u", "hi")), world)
    assert one.speculation_refused() == "busy"
    world.thinker.release()
    await turn
    assert one.speculation_refused() == ""


async def test_a_speculative_turn_is_urgent_until_it_is_confirmed(world):
    one = await world.orchestrator.open_session("one")
    other = await world.orchestrator.open_session("other")
    world.thinker.holds_at = 1
    turn = await started(other, speculative("t", user("u", "hi")), world)
    assert one.speculation_refused() == "busy"
    world.thinker.release()
    await turn
    assert one.speculation_refused() == "", "it makes nothing any more"


async def test_on_a_full_server_none_begins(world_of):
    orchestrator = (await world_of(max_sessions=1)).orchestrator
    assert (await orchestrator.open_session("one")).speculation_refused() == "no_room"


async def test_a_session_that_wastes_too_much_pauses_until_it_was_useful(world):
    session = await world.orchestrator.open_session("session")
    other = await world.orchestrator.open_session("other")
    n_wasted = 0
    while not session.speculation_refused():
        await done(session, speculative(f"w{n_wasted}", user(f"u{n_wasted}", "hi")))
        session.end_speculation(confirmed=False)
        n_wasted += 1
    assert n_wasted > 1
    assert session.speculation_refused() == "session_waste"
    assert other.speculation_refused() == ""
    for n in range(3):
        await done(session, ask(f"t{n}", user("u", "hi")))
    assert session.speculation_refused() == ""


async def test_what_all_sessions_waste_together_is_bounded(world):
    world.orchestrator.speculations.left = 1
    session = await world.orchestrator.open_session("session")
    await done(session, speculative("w", user("u", "hi")))
    assert session.speculation_refused() == "", "it may still become the response"
    await session.close()
    other = await world.orchestrator.open_session("other")
    assert other.speculation_refused() == "server_waste"


# --- admission ---


class Admission:
    """The deadlines of a session's turns as admission counted them."""

    def __init__(self, orchestrator):
        self.shares: list[float] = []
        deadlines = orchestrator.capacity._deadlines
        count = deadlines.count

        def counted(session_id: str, share: float, *kind: Kind) -> None:
            self.shares.append(share)
            count(session_id, share, *kind)

        deadlines.count = counted


async def test_a_withdrawn_turn_meets_no_deadline(world):
    admission = Admission(world.orchestrator)
    session = await world.orchestrator.open_session("session")
    await done(session, speculative("w", user("u", "hi")))
    session.end_speculation(confirmed=False)
    assert admission.shares == []


@pytest.mark.parametrize("confirmed_first", [True, False])
async def test_a_confirmed_turn_has_its_deadline_from_then_on(world, confirmed_first):
    admission = Admission(world.orchestrator)
    session = await world.orchestrator.open_session("session")
    if confirmed_first:
        world.thinker.holds_at = 1
        turn = await started(session, speculative("t", user("u", "hi")), world)
        world.clock.advance(5.0)
        session.end_speculation(confirmed=True)
        world.thinker.release()
        await turn
    else:
        await done(session, speculative("t", user("u", "hi")))
        world.clock.advance(5.0)
        session.end_speculation(confirmed=True)
    first_packet, flow = admission.shares
    assert first_packet == 0, "5 s were no wait of the user"
    assert flow == 0


async def test_a_confirmed_turn_that_failed_counts_as_late(world):
    admission = Admission(world.orchestrator)
    world.thinker.fails_at = 0
    session = await world.orchestrator.open_session("session")
    with pytest.raises(LiveError, match="full"):
        await done(session, speculative("t", user("u", "hi")))
    assert admission.shares == []
    session.end_speculation(confirmed=True)
    assert admission.shares == [float("inf")]


# --- usage ---


async def prefilled(session, name: str, *history: HistoryItem) -> None:
    assert session.prefill_turn(replace(ask(name, *history), prefill_only=True))
    await session.turn_prefill.finish()


async def test_after_a_withdrawn_turn_the_usage_is_that_of_a_session_without_it(world):
    usages = []
    for name in ("withdrawn", "without"):
        session = await world.orchestrator.open_session(name)
        begun = piece(f"{name}-0", opens=True)
        await prefilled(session, f"{name}-a", begun)
        if name == "withdrawn":
            early = piece(f"{name}-early", closes=True)
            await done(session, speculative(f"{name}-s", begun, early))
            session.end_speculation(confirmed=False)
        end = piece(f"{name}-1", closes=True)
        usages.append((await done(session, ask(f"{name}-t", begun, end))).usage)
    assert usages[0] == usages[1]
    assert usages[0].input_audio_tokens == 2 * N_STATES


@pytest.mark.parametrize("confirmed_first", [True, False])
async def test_audio_of_a_confirmed_turn_is_counted_once(world, confirmed_first):
    session = await world.orchestrator.open_session("session")
    begun, end = piece("p0", opens=True), piece("p1", closes=True)
    await prefilled(session, "a", begun)
    if confirmed_first:
        world.thinker.holds_at = 1
    turn = await started(session, speculative("s", begun, end), world)
    if confirmed_first:
        session.end_speculation(confirmed=True)
        world.thinker.release()
    first = await turn
    session.end_speculation(confirmed=True)
    second = await done(session, ask("t", begun, end, first.item, piece("p2", opens=True)))
    assert first.usage.input_audio_tokens == 2 * N_STATES
    assert second.usage.input_audio_tokens == N_STATES


# --- what a turn has made ---


def test_a_turn_is_urgent_while_its_listener_has_little_audio():
    work = TurnWork(ask("t", user("u", "hi")))
    assert work.is_urgent(0.0, 0.5)
    work.made(AudioDelta(bytes(2 * OUTPUT_RATE_HZ)))
    assert not work.is_urgent(0.0, 0.5)
    work.heard(0.0, True, 10.0)
    assert not work.is_urgent(10.4, 0.5)
    assert work.is_urgent(10.6, 0.5)
    work.heard(0.6, False, 10.6)
    assert work.is_urgent(10.6, 0.5)


def test_a_written_turn_is_not_urgent():
    assert not TurnWork(ask("t", user("u", "hi"), wants_audio=False)).is_urgent(0.0, 0.5)
