"""Turns that are interrupted, and whose playback is reported, while they run."""

import asyncio
import dataclasses
import math

import pytest

from sglang_live.clock import SimClock
from sglang_live.core import FRAME_S, AudioDelta, TranscriptDelta, TurnDone
from sglang_live.errors import StageUnavailableError
from sglang_live.messages import NextUseHint, UserSpeaking
from sglang_live.orchestrator.stage_jobs import TextJob
from sglang_live.orchestrator.turn_control import REPORT_EVERY_S, TurnControl
from sglang_live.policy.policies import Policies

from .fakes import ask, user

pytestmark = pytest.mark.usefixtures("must_not_hang")

ALL = ("urgency", "pacing", "truncate")


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@pytest.fixture
async def world(world_of):
    return await world_of(policies=ALL)


@pytest.fixture
async def session(world):
    return await world.orchestrator.open_session("session")


class Listener:
    """Takes a turn's events as they come, like a connection."""

    def __init__(self, turn):
        self.events: list = []
        self._turn = turn
        self.task = asyncio.create_task(self._take())

    async def _take(self) -> TurnDone:
        async for event in self._turn:
            self.events.append(event)
        return self.events[-1]

    def n(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


# --- interruptions ---


async def test_an_interrupted_turn_has_the_generated_tokens_and_counts_its_frames(world, session):
    world.thinker.holds_at = 2
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: listener.n(AudioDelta) == 2)
    assert session.interrupt()
    done = await listener.task
    assert (done.status, done.reason) == ("interrupted", None)
    assert (done.item.key, done.item.token_ids) == ("response-t1", (5, 6))
    assert done.item.parts[0].text == " 5 6"
    assert (done.n_frames, done.spoken) == (2, False)
    assert done.usage.output_audio_tokens == 2


async def test_only_talker_and_vocoder_are_cancelled_and_at_once(world, session):
    world.thinker.holds_at = 2
    ending, reply = asyncio.Event(), world.thinker._reply

    async def reply_that_ends_slowly(job):
        said = await reply(job)
        await ending.wait()
        return said

    world.thinker._reply = reply_that_ends_slowly
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: listener.n(AudioDelta) == 2)
    assert session.interrupt()
    await until(lambda: world.talker.cancelled and world.vocoder.cancelled)
    assert not listener.task.done(), "the thinker has not said yet what it wrote"
    ending.set()
    await listener.task
    await world.settled()
    assert world.thinker.cancelled == [] and world.n_jobs() == 0


async def test_no_sound_comes_after_an_interruption(world_of):
    world = await world_of(reply=range(1, 40), policies=ALL)
    session = await world.orchestrator.open_session("session")
    turn = session.respond(ask("t1", user("u1", "hi")))
    while not isinstance(await anext(turn), AudioDelta):
        pass
    await world.settled()  # more sound is on its way to us
    assert session.interrupt()
    assert not any([isinstance(event, AudioDelta) async for event in turn])


@pytest.mark.parametrize("stage", ["talker", "vocoder"])
async def test_an_interruption_does_not_wait_for_a_stuck_stage(world, session, stage):
    getattr(world, stage).holds_at = 1
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: listener.n(TranscriptDelta) == 3 and getattr(world, stage).openers)
    session.interrupt()
    done = await listener.task
    assert (done.status, done.item.token_ids) == ("interrupted", (5, 6, 7))
    await world.settled()
    assert world.n_jobs() == 0


async def test_a_reply_that_was_written_already_is_kept_whole(world, session):
    world.talker.holds_at = 1
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: listener.n(AudioDelta) == 1)
    await until(lambda: "response-t1" in world.thinker.items["session"])
    session.interrupt()
    done = await listener.task
    assert (done.item.token_ids, done.n_frames, done.spoken) == ((5, 6, 7), 1, False)
    assert world.thinker.n_ended <= 1


async def test_a_talker_that_ended_before_the_interruption_has_spoken(world, session):
    world.vocoder.holds_at = 1
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: world.talker.openers and not world.process(world.talker).server.n_jobs)
    await world.settled()
    session.interrupt()
    done = await listener.task
    assert (done.status, done.n_frames, done.spoken) == ("interrupted", 3, True)


async def test_a_turn_interrupted_before_its_first_token_is_empty(world, session):
    world.thinker.holds_at = 0
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: world.thinker.openers)
    assert session.interrupt()
    done = await listener.task
    assert (done.status, done.item.token_ids) == ("interrupted", ())
    assert (done.n_frames, done.spoken) == (0, False)
    assert world.talker.openers == [] and world.vocoder.openers == []


async def test_an_interruption_before_the_job_begins_reaches_the_thinker(world, session):
    world.thinker.holds_at = 0
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await asyncio.sleep(0)  # the turn has begun, its messages may not have left
    assert session.interrupt()
    assert (await listener.task).status == "interrupted"


async def test_a_thinker_that_lost_its_items_is_interrupted_again(world, session):
    await Listener(session.respond(ask("t0", user("u0", "hi")))).task
    world.thinker.items.clear()
    world.thinker.holds_at = 0
    listener = Listener(session.respond(ask("t1", user("u0", "hi"), user("u1", "and?"))))
    await asyncio.sleep(0)
    session.interrupt()
    assert (await listener.task).status == "interrupted"


async def test_the_next_turn_sends_what_was_heard_of_the_reply_and_no_more(world, session):
    first = user("u1", "hi")
    world.thinker.holds_at = 2
    listener = Listener(session.respond(ask("t1", first)))
    await until(lambda: listener.n(AudioDelta) == 2)
    session.interrupt()
    await listener.task
    world.thinker.holds_at = None
    heard = user("response-t1-cut", token_ids=(5,))
    listener = Listener(session.respond(ask("t2", first, heard, user("u2", "and?"))))
    assert (await listener.task).status == "completed"
    assert [item.key for item in world.thinker.openers[-1].items] == ["response-t1-cut", "u2"]
    assert world.thinker.openers[-1].session_id == "session"


async def test_a_second_interruption_changes_nothing(world, session):
    world.thinker.holds_at = 1
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: listener.n(TranscriptDelta) == 1)
    assert session.interrupt() and session.interrupt()
    await listener.task
    assert world.thinker.n_ended == 1


async def test_a_text_turn_is_interrupted_too(world, session):
    world.thinker.holds_at = 2
    listener = Listener(session.respond(ask("t1", user("u1", "hi"), wants_audio=False)))
    await until(lambda: listener.n(TranscriptDelta) == 2)
    assert session.interrupt()
    assert (await listener.task).item.token_ids == (5, 6)


async def test_only_a_turn_of_the_conversation_can_be_interrupted(world, session):
    assert not session.interrupt()
    world.thinker.holds_at = 1
    aside = Listener(session.respond(ask("aside", user("x", "psst"), stateless=True)))
    await until(lambda: aside.n(TranscriptDelta) == 1)
    assert not session.interrupt()
    world.thinker.release()
    assert (await aside.task).status == "completed"
    done = await Listener(session.respond(ask("t1", user("u1", "hi")))).task
    assert done.status == "completed"
    assert not session.interrupt()


async def test_a_turn_cannot_be_interrupted_after_its_last_event(session):
    async for event in session.respond(ask("t1", user("u1", "hi"))):
        if isinstance(event, TurnDone):
            assert not session.interrupt()


@pytest.mark.parametrize("policies", [(), ("urgency", "pacing")])
async def test_without_the_policy_a_turn_cannot_be_interrupted(world_of, policies):
    world = await world_of(policies=policies)
    session = await world.orchestrator.open_session("session")
    world.thinker.holds_at = 1
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: listener.n(TranscriptDelta) == 1)
    assert not session.interrupt()
    world.thinker.release()
    assert (await listener.task).status == "completed"
    assert world.thinker.n_ended == 0


async def test_a_thinker_that_fails_while_it_ends_fails_the_turn(world, session):
    world.thinker.holds_at = 1
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: listener.n(TranscriptDelta) == 1)
    await world.process(world.thinker).stop()
    session.interrupt()
    with pytest.raises(StageUnavailableError, match="process ended"):
        await listener.task
    assert not session.interrupt()


# --- the transcript's place in the reply ---


async def test_transcript_deltas_count_the_tokens_so_far(session):
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    done = await listener.task
    assert [e.n_tokens for e in listener.events if isinstance(e, TranscriptDelta)] == [1, 2, 3]
    assert (done.n_frames, done.spoken) == (3, True)


# --- playback and speech ---


async def test_playback_reaches_the_talker_of_the_running_turn(world, session):
    world.thinker.holds_at = 2
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: listener.n(AudioDelta) == 2)
    session.report_playback(0.16, playing=True)
    await until(lambda: world.talker.progress)
    [told] = world.talker.progress
    assert (told.heard_s, told.advancing) == (0.16, True)
    world.thinker.release()
    await listener.task
    session.report_playback(0.24, playing=False)
    await world.settled()
    assert len(world.talker.progress) == 1


async def test_playback_before_or_after_the_talkers_job_is_not_sent(world, session):
    session.report_playback(0.0, playing=False)
    world.thinker.holds_at = 0
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: world.thinker.openers)
    session.report_playback(0.0, playing=False)
    world.vocoder.holds_at = 1
    world.thinker.release()
    await until(lambda: world.talker.openers and not world.process(world.talker).server.n_jobs)
    await world.settled()
    session.report_playback(0.08, playing=True)
    world.vocoder.release()
    await listener.task
    assert world.talker.progress == []


class ToldThinker:
    def __init__(self) -> None:
        self.told: list[tuple[float, bool]] = []

    def report(self, spoken_s: float, advancing: bool, speed: float = 1.0) -> None:
        self.told.append((round(spoken_s / FRAME_S, 3), advancing))


@pytest.fixture
def thinker() -> ToldThinker:
    return ToldThinker()


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture
def control(thinker, clock) -> TurnControl:
    control = TurnControl(Policies.parse(ALL), clock)
    control.attach(thinker, None, None)
    return control


def test_a_talker_in_real_time_is_reported_once_and_then_rarely(control, thinker, clock):
    for n in range(1, 50):
        control.frames_came(n)
        clock.advance(FRAME_S)
    every = math.ceil(REPORT_EVERY_S / FRAME_S)
    assert thinker.told == [(n, True) for n in range(1, 50, every)]


def test_a_talker_that_runs_ahead_is_reported_at_every_third_frame(control, thinker):
    for n in range(1, 12):
        control.frames_came(n)
    assert [n for n, _ in thinker.told] == [1, 4, 7, 10]


def test_a_talker_that_fell_behind_is_reported(control, thinker, clock):
    control.frames_came(1)
    clock.advance(3.5 * FRAME_S)
    control.frames_came(2)
    control.frames_came(3)
    assert [n for n, _ in thinker.told] == [1, 2]


def test_a_thinker_does_not_wait_for_a_voice_that_waits_for_its_text(thinker, clock):
    control = TurnControl(Policies.parse(ALL), clock)
    voice = FakeVoice()
    control.attach(thinker, TextJob(ask("t1", user("u1", "hi"))), voice)
    for n in range(20):  # without playback, such as of a response over HTTP
        control.frames_came(n)
        clock.advance(1.0)
    assert thinker.told == []
    control.heard(0.0, False)
    voice.audio_s = 4.0
    control.heard(0.8, True)
    control.heard(3.0, True)
    control.heard(4.0, False)
    heard = [frames for frames, _ in thinker.told]
    assert heard == [math.inf, 10, math.inf, math.inf]


@dataclasses.dataclass
class FakeVoice:
    audio_s: float = 0.0


class ToldTalker:
    def report(self, *_: object) -> None:
        """What is told to the talker is no matter here."""


def test_playback_is_reported_to_the_thinker_once_the_talker_has_frames(thinker, clock):
    control = TurnControl(Policies.parse(ALL), clock)
    control.attach(thinker, ToldTalker(), None)
    control.heard(0.0, False)
    assert thinker.told == []  # the talker has no frames yet
    control.frames_came(4)
    control.heard(0.08, True)
    control.frames_came(30)
    assert thinker.told == [(4, True), (1, True)]


async def test_the_talkers_progress_is_reported_to_the_thinker(world, session):
    session.report_playback(0.0, playing=False)
    world.thinker.holds_at = 2
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: world.thinker.progress)
    [told] = world.thinker.progress
    assert (told.heard_s, told.advancing) == (FRAME_S, True)
    world.thinker.release()
    await listener.task


async def test_speech_is_reported_to_a_thinker_that_has_the_session(world, session):
    session.report_speech()
    await Listener(session.respond(ask("t1", user("u1", "hi")))).task
    session.report_speech()
    session.report_speech(speaks=False)
    await world.settled()
    assert world.thinker.hints == [
        UserSpeaking("session"),
        UserSpeaking("session", speaks=False),
    ]


async def test_the_next_use_is_reported_to_a_thinker_that_has_the_session(world_of):
    world = await world_of(policies=("next-use",))
    session = await world.orchestrator.open_session("session")
    session.report_next_use(1.0, None, None)
    aside = dataclasses.replace(ask("t0", user("u0", "hi")), stateless=True)
    await Listener(session.respond(aside)).task
    session.report_next_use(2.0, None, None)
    await Listener(session.respond(ask("t1", user("u1", "hi")))).task
    session.report_next_use(3.0, 1.5, 1.25)
    await session.close()
    session.report_next_use(4.0, None, None)
    await world.settled()
    assert world.thinker.hints == [NextUseHint("session", 3.0, 1.5, 1.25)]
    assert world.talker.hints == world.vocoder.hints == []


async def test_the_next_use_is_reported_with_its_policy_only(world, session):
    await Listener(session.respond(ask("t1", user("u1", "hi")))).task
    session.report_next_use(3.0, 1.5, 1.25)
    await world.settled()
    assert world.thinker.hints == []


async def test_without_policies_nothing_is_reported_to_the_stages(world_of):
    world = await world_of()
    session = await world.orchestrator.open_session("session")
    world.thinker.holds_at = 2
    listener = Listener(session.respond(ask("t1", user("u1", "hi"))))
    await until(lambda: listener.n(AudioDelta) == 2)
    session.report_playback(0.16, playing=True)
    session.report_speech()
    world.thinker.release()
    await listener.task
    await world.settled()
    assert [stage.progress for stage in world.stages] == [[], [], []]
    assert world.thinker.hints == []
