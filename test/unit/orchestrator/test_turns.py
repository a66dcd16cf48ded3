"""Turns through three fake stages: what the listener gets, and what each stage was asked."""

import asyncio

import numpy as np
import pytest

from sglang_live.core import (
    AudioDelta,
    AudioPart,
    HistoryItem,
    TextDone,
    TranscriptDelta,
    TurnDone,
)
from sglang_live.errors import (
    DeadlineError,
    ItemsMissingError,
    StageFailedError,
    StageUnavailableError,
)
from sglang_live.messages import SegmentsNeeded, TalkerDone, WireAudio, WireText
from sglang_live.orchestrator import stage_jobs
from sglang_live.stages.spec import STAGES
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.queues import WINDOW

from .fakes import N_STATES, ask, user

pytestmark = pytest.mark.usefixtures("must_not_hang")


def transcript(events: list) -> str:
    return "".join(event.text for event in events if isinstance(event, TranscriptDelta))


def sound(events: list) -> list[int]:
    pcm = b"".join(event.pcm for event in events if isinstance(event, AudioDelta))
    return np.frombuffer(pcm, "<i2").tolist()


async def answer(session, turn) -> list:
    return [event async for event in session.respond(turn)]


@pytest.fixture
async def session(world):
    return await world.orchestrator.open_session("session")


# --- what the listener gets ---


async def test_a_turn_is_text_and_its_audio_then_done(session):
    events = await answer(session, ask("t1", user("u1", "hello")))
    assert transcript(events) == " 5 6 7"
    assert sound(events) == [5, 6, 7]
    assert isinstance(events[0], TranscriptDelta)
    assert [event for event in events if isinstance(event, TurnDone)] == events[-1:]


async def test_the_end_of_the_text_is_told_before_the_end_of_the_audio(session):
    events = await answer(session, ask("t1", user("u1", "hello")))
    [at] = [i for i, event in enumerate(events) if isinstance(event, TextDone)]
    assert events[at].n_tokens == 3
    assert not any(isinstance(event, TranscriptDelta) for event in events[at:])
    assert any(isinstance(event, AudioDelta) for event in events[at:])


async def test_done_has_the_item_as_generated_and_its_usage(session):
    events = await answer(session, ask("t1", user("u1", "hear this:", 800)))
    done = events[-1]
    assert (done.status, done.reason) == ("completed", None)
    assert (done.item.key, done.item.role) == ("response-t1", "assistant")
    assert done.item.token_ids == (5, 6, 7)
    assert done.item.parts[0].text == " 5 6 7"
    usage = done.usage
    assert (usage.input_text_tokens, usage.input_audio_tokens) == (20 - N_STATES, N_STATES)
    assert (usage.output_text_tokens, usage.output_audio_tokens) == (3, 3)
    assert usage.cached_tokens == 7
    marks = list(done.trace)
    assert (marks[0], marks[-1]) == ("thinker_first_token", "turn_done")
    assert {"talker_first_frame", "first_audio", "thinker_done", "talker_done"} <= set(marks)


async def test_a_reply_cut_at_its_limit_is_incomplete(world, session):
    world.thinker.finish = "length"
    done = (await answer(session, ask("t1", user("u1", "hi"), max_output_tokens=3)))[-1]
    assert (done.status, done.reason) == ("incomplete", "max_output_tokens")


async def test_the_first_audio_comes_before_the_last_token(world, session):
    world.thinker.holds_at = 2  # two of three tokens are out
    turn = session.respond(ask("t1", user("u1", "hi")))
    events = [await anext(turn)]
    assert isinstance(events[0], TranscriptDelta), "no sound comes before its text"
    while sound(events) != [5, 6]:
        events.append(await anext(turn))
    assert transcript(events) == " 5 6"
    world.thinker.release()
    events += [event async for event in turn]
    assert (transcript(events), sound(events)) == (" 5 6 7", [5, 6, 7])


async def test_a_long_reply_passes_through_windows_of_every_stage_whole(world_of):
    reply = [n % 30_000 for n in range(5 * WINDOW)]
    world = await world_of(reply)
    session = await world.orchestrator.open_session("session")
    events = await answer(session, ask("t1", user("u1", "tell me")))
    assert sound(events) == reply


async def test_an_empty_reply_is_silent_and_completes(world_of):
    world = await world_of(reply=[])
    session = await world.orchestrator.open_session("session")
    events = await answer(session, ask("t1", user("u1", "hi")))
    assert [type(event) for event in events] == [TextDone, TurnDone]
    assert events[-1].status == "completed"
    assert world.talker.openers == [] and world.vocoder.openers == []


async def test_a_text_turn_opens_no_job_in_talker_and_vocoder(world, session):
    events = await answer(session, ask("t1", user("u1", "hi"), wants_audio=False))
    assert transcript(events) == " 5 6 7"
    assert sound(events) == []
    assert events[-1].usage.output_audio_tokens == 0
    assert world.talker.openers == [] and world.vocoder.openers == []


async def test_a_talker_that_stops_early_does_not_hold_up_the_text(world_of):
    world = await world_of(reply=range(1, 4 * WINDOW))

    async def say_nothing(job):
        await job.send(TalkerDone(job.job_id, "length", 0))

    world.talker.serve = say_nothing
    session = await world.orchestrator.open_session("session")
    events = await answer(session, ask("t1", user("u1", "hi")))
    assert len(events[-1].item.token_ids) == 4 * WINDOW - 1
    assert sound(events) == []
    # Its listener is told that there is more text than sound.
    assert (events[-1].status, events[-1].reason) == ("incomplete", "max_output_tokens")
    assert not events[-1].spoken


# --- what the stages are asked ---


async def test_settings_of_the_turn_reach_the_stages(world, session):
    turn = ask("t1", user("u1", "hi"), temperature=0.0, seed=11, max_output_tokens=9)
    await answer(session, turn)
    [think], [speak] = world.thinker.openers, world.talker.openers
    assert (think.instructions, think.session_id) == ("Be brief.", "session")
    assert (think.temperature, think.max_tokens, think.seed) == (0.0, 9, 11)
    assert (speak.voice, speak.first_id, speak.seed, speak.temperature) == ("ethan", 5, 11, 0.0)


async def test_turns_without_a_seed_get_one_of_their_own(world, session):
    await answer(session, ask("t1", user("u1", "hi")))
    await answer(session, ask("t2", user("u1", "hi")))
    first, second = (opener.seed for opener in world.talker.openers)
    assert first != second
    assert 0 <= first < 2**63 and 0 <= second < 2**63


async def test_sound_and_states_arrive_in_the_stages_as_they_were(world, session, monkeypatch):
    taken = []
    take = wire.take
    monkeypatch.setattr(wire, "take", lambda *a: taken.append(take(*a)) or taken[-1])
    await answer(session, ask("t1", user("u1", "listen", 500)))
    clip, from_thinker, in_talker = taken
    np.testing.assert_array_equal(clip, np.arange(500))
    np.testing.assert_array_equal(from_thinker, in_talker)
    [item] = world.thinker.openers[0].items
    assert [type(part) for part in item.parts] == [WireText, WireAudio]


async def test_every_item_is_sent_once(world, session):
    first = user("u1", "hi", 300)
    done = (await answer(session, ask("t1", first)))[-1]
    await answer(session, ask("t2", first, done.item, user("u2", "and?")))
    thinks, speaks = world.thinker.openers, world.talker.openers
    assert [[item.key for item in think.items] for think in thinks] == [["u1"], ["u2"]]
    assert thinks[1].keys == ["u1", "response-t1", "u2"]
    assert [[segment.key for segment in speak.segments] for speak in speaks] == [["u1"], ["u2"]]
    assert speaks[1].segment_keys == ["u1", "u2"]


async def test_a_reply_the_stage_did_not_generate_is_sent_as_its_tokens(world, session):
    heard_part = user("r1-cut", "ignored", token_ids=(5, 6))
    await answer(session, ask("t1", user("u1", "hi"), heard_part, user("u2", "go on")))
    sent = {item.key: item for item in world.thinker.openers[0].items}
    assert (sent["r1-cut"].token_ids, sent["r1-cut"].parts) == ([5, 6], [])
    assert world.talker.openers[0].segment_keys == ["u1", "u2"]


@pytest.mark.parametrize("stage", STAGES)
async def test_after_a_restart_a_stage_receives_all_items_again(world, session, stage):
    first = user("u1", "hi", 300)
    done = (await answer(session, ask("t1", first)))[-1]
    await world.process(getattr(world, stage)).restart()
    events = await answer(session, ask("t2", first, done.item, user("u2", "and?")))
    assert sound(events) == [5, 6, 7]
    think, speak = world.thinker.openers[-1], world.talker.openers[-1]
    assert len(think.items) == (3 if stage == "thinker" else 1)
    assert len(speak.segments) == (2 if stage == "talker" else 1)


async def test_a_stage_that_lost_the_session_receives_all_items(world, session):
    first = user("u1", "hi", 300)
    done = (await answer(session, ask("t1", first)))[-1]
    world.thinker.items.clear()
    events = await answer(session, ask("t2", first, done.item, user("u2", "and?")))
    assert sound(events) == [5, 6, 7]
    asked = [[item.key for item in think.items] for think in world.thinker.openers]
    assert asked == [["u1"], ["u2"], ["u1", "response-t1", "u2"]]


async def test_packed_audio_is_sent_as_samples_after_a_restart(world, session):
    pcm = np.full(4000, 700, np.int16)
    first = HistoryItem(key="u1", role="user", parts=(AudioPart(pcm),))
    done = (await answer(session, ask("t1", first)))[-1]
    await world.process(world.thinker).restart()
    first = first.with_audio(AudioPart.packed)
    await answer(session, ask("t2", first, done.item, user("u2", "and?")))
    sent = {item.key: item for item in world.thinker.openers[-1].items}
    (part,) = sent["u1"].parts
    assert (part.pcm.dtype, part.pcm.shape) == ("<i2", [4000])


async def test_a_stage_that_always_lacks_items_fails_the_turn_instead_of_looping(world, session):
    def forget(*_):
        raise ItemsMissingError("all unknown")

    world.thinker.remember = forget
    with pytest.raises(StageFailedError) as caught:
        await answer(session, ask("t1", user("u1", "hi")))
    assert caught.value.reason == "items_missing"
    assert len(world.thinker.openers) == 2


async def test_a_talker_cancelled_before_it_had_its_items_receives_them_again(world, session):
    # The stage dropped the request unread; only its answer proves that it took the segments.
    world.talker.fails_at = 0
    world.talker.remember = lambda *_: {}
    with pytest.raises(StageFailedError):
        await answer(session, ask("t1", user("u1", "hi")))
    del world.talker.remember
    world.talker.fails_at = None
    events = await answer(session, ask("t2", user("u1", "hi"), user("u2", "hello?")))
    assert sound(events) == [5, 6, 7]


async def test_a_talker_that_lost_messages_receives_them_within_the_turn(world, session):
    first, second = user("u1", "hi", 300), user("u2", "and?", 300)
    await answer(session, ask("t1", first, second))
    del world.talker.items["session"]["u1"]
    events = await answer(session, ask("t2", first, second, user("u3", "hello?")))
    assert sound(events) == [5, 6, 7]
    assert world.talker.needed == [["u1"]]
    states = world.talker.items["session"]["u1"]
    np.testing.assert_array_equal(states, np.full((N_STATES, 2), 0.5, np.float32))


async def test_a_talker_that_needs_messages_of_another_turn_fails_its_turn(world, session):
    async def ask_for_more(job):
        await job.send(SegmentsNeeded(job.job_id, ["another"]))
        await anext(job.inputs())

    world.talker.serve = ask_for_more
    with pytest.raises(StageFailedError, match="messages of another turn"):
        await answer(session, ask("t1", user("u1", "hi")))


async def test_a_message_that_returns_after_its_deletion_is_sent_again(world, session):
    first, second = user("u1", "one"), user("u2", "two")
    await answer(session, ask("t1", first, second))
    await answer(session, ask("t2", second))
    events = await answer(session, ask("t3", first, second))
    assert sound(events) == [5, 6, 7]


# --- turns that leave no trace ---


async def test_a_stateless_turn_leaves_nothing_in_the_stages(world, session):
    first = user("u1", "hi", 300)
    done = (await answer(session, ask("t1", first)))[-1]
    kept = [dict(stage.items) for stage in world.stages]
    aside = ask("aside", first, user("x", "what was that?", 200), stateless=True)
    assert sound(await answer(session, aside)) == [5, 6, 7]
    assert world.thinker.openers[-1].session_id == ""
    assert world.talker.openers[-1].session_id == ""
    assert [item.key for item in world.thinker.openers[-1].items] == ["u1", "x"]
    assert [dict(stage.items) for stage in world.stages] == kept
    await answer(session, ask("t2", first, done.item, user("u2", "and?")))
    assert [item.key for item in world.thinker.openers[-1].items] == ["u2"]


async def test_a_stateless_turn_may_run_beside_a_normal_one(world, session):
    world.thinker.holds_at = 1
    aside = session.respond(ask("aside", user("x", "psst", 200), stateless=True))
    assert (await anext(aside)).text == " 5"
    world.thinker.holds_at = None
    events = await answer(session, ask("t1", user("u1", "hi")))  # forgets what is not its own
    assert sound(events) == [5, 6, 7]
    world.thinker.release()
    assert sound([event async for event in aside]) == [5, 6, 7]


# --- failures and early ends ---


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_failure_in_a_stage_fails_the_turn_and_cancels_the_others(
    world, session, stage, at
):
    failing = getattr(world, stage)
    failing.fails_at = at
    others = [other for other in world.stages if other is not failing]
    for other in others:
        other.holds_at = 3  # none of them can be done by itself
    with pytest.raises(StageFailedError, match=f"{stage}/0: {stage} is full") as caught:
        await answer(session, ask("t1", user("u1", "hi")))
    assert caught.value.reason == "server_overloaded"
    await world.settled()
    for other in others:
        assert len(other.cancelled) == len(other.openers)
    assert world.n_jobs() == 0


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_that_dies_fails_the_turn_and_the_next_one_works(world, session, stage):
    dying = getattr(world, stage)
    dying.holds_at = 1
    turn = session.respond(ask("t1", user("u1", "hi")))
    await anext(turn)
    while not dying.openers:
        await asyncio.sleep(0.001)
    await world.process(dying).stop()
    with pytest.raises(StageUnavailableError, match=f"{stage}/0: process ended"):
        async for _ in turn:
            pass
    with pytest.raises(StageUnavailableError, match=f"{stage}/0 is"):
        await answer(session, ask("t2", user("u1", "hi")))
    dying.holds_at = None
    await world.process(dying).start()
    assert sound(await answer(session, ask("t3", user("u1", "hi")))) == [5, 6, 7]


@pytest.mark.parametrize("stage", STAGES)
async def test_closing_a_turn_early_cancels_it_in_every_stage(world, session, stage):
    # Wherever the turn stands when the listener interrupts it.
    getattr(world, stage).holds_at = 1
    turn = session.respond(ask("t1", user("u1", "hi", 300)))
    await anext(turn)
    while not all(other.openers for other in world.stages):
        await asyncio.sleep(0.001)
    await turn.aclose()
    await world.settled()
    unfinished = world.stages[STAGES.index(stage) :]
    assert [len(other.cancelled) for other in unfinished] == [1] * len(unfinished)
    assert world.n_jobs() == 0
    getattr(world, stage).holds_at = None
    assert sound(await answer(session, ask("t2", user("u1", "hi", 300)))) == [5, 6, 7]


async def test_a_turn_closed_at_its_first_word_leaves_the_session_usable(world, session):
    for n in range(5):
        turn = session.respond(ask(f"t{n}", user("u1", "hi", 300)))
        await anext(turn)
        await turn.aclose()
    assert sound(await answer(session, ask("last", user("u1", "hi", 300)))) == [5, 6, 7]


async def test_a_silent_thinker_fails_the_turn_and_is_cancelled(world, session, monkeypatch):
    monkeypatch.setattr(stage_jobs, "THINKER_SILENCE_LIMIT_S", 0.05)
    world.thinker.holds_at = 1
    with pytest.raises(DeadlineError, match="thinker/0 was silent"):
        await answer(session, ask("t1", user("u1", "hello")))
    await world.settled()
    assert world.n_jobs() == 0
