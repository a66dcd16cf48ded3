"""A call with a model that hears while it speaks: its clocks, and what is left after a stage's end.

The user's frame n is sound of value n, which the vocoder hears as code n; the talker answers code n
with frame n, of one code, which sounds as the value n.
"""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from sglang_live.clock import SimClock
from sglang_live.messages import (
    DuplexFrames,
    DuplexRequest,
    HeardFrame,
    HearRequest,
    Pcm,
    UserSound,
    VocoderFrames,
)
from sglang_live.orchestrator.duplex import MOST_BEHIND, MOST_EARLY, DuplexCall, DuplexSettings
from sglang_live.orchestrator.metronome import Metronome
from sglang_live.orchestrator.stage_links import ScriptLink, StageLinks, TalkerLink, VocoderLink
from sglang_live.stages.transport.server import ServedJob

from .fakes import FakeReplica, FakeStage

FRAME_S = 0.08
N_SAMPLES = 1920


def codes(*values: int) -> bytes:
    return np.asarray(values, "<i2").tobytes()


class FakeDuplexTalker(FakeStage):
    """heard: codes of users, of the latest job."""

    name = "talker"

    async def serve(self, job: ServedJob) -> None:
        self.heard = []
        if not job.opener.n_frames:
            await job.send(DuplexFrames(job.job_id, codes(0, 0), b"", "begin "))
        async for message in job.inputs():
            if isinstance(message, HeardFrame):
                await self.step(len(self.heard))
                n = int(np.frombuffer(message.codes, "<i2")[0])
                self.heard.append(n)
                await job.send(DuplexFrames(job.job_id, codes(n, n), codes(n), f"{n} "))


class FakeDuplexVocoder(FakeStage):
    name = "vocoder"

    async def serve(self, job: ServedJob) -> None:
        async for message in job.inputs():
            if isinstance(message, UserSound):
                await job.send(HeardFrame(job.job_id, message.pcm[:2]))
            elif isinstance(message, VocoderFrames):
                await job.send(Pcm(job.job_id, message.codes))


class Deadlines:
    """ended: how each of them has ended, by number."""

    def __init__(self):
        self.n, self.ended = 0, {}

    def begin(self) -> int:
        self.n += 1
        return self.n

    def came(self, deadline: int) -> None:
        assert self.ended.setdefault(deadline, "came") == "came"

    def failed(self, deadline: int) -> None:
        assert self.ended.setdefault(deadline, "failed") == "failed"

    def abandoned(self, deadline: int) -> None:
        assert self.ended.setdefault(deadline, "abandoned") == "abandoned"


class World:
    """One call. said: its frames so far."""

    def __init__(self, run_dir):
        self.talker, self.vocoder = FakeDuplexTalker(), FakeDuplexVocoder()
        self.replicas = [FakeReplica(stage, run_dir) for stage in (self.talker, self.vocoder)]
        self.clock = SimClock(1.0)
        self.said = []

    async def start(self) -> None:
        for replica in self.replicas:
            await replica.start()
        talker, vocoder = (replica.entry for replica in self.replicas)
        links = StageLinks(ScriptLink(), TalkerLink(talker, "s"), VocoderLink(vocoder, "s"))
        settings = DuplexSettings(
            frame_s=FRAME_S, voice="v", role="r", temperature=None, seed=3, window_frames=9
        )
        metronome = Metronome(self.clock)
        self.deadlines = Deadlines()
        self.call = DuplexCall(
            "c", links, settings, self.clock, metronome, self.deadlines, lambda: None
        )
        self._running = asyncio.create_task(self._run())
        await self.settled()

    async def _run(self) -> None:
        async with aclosing(self.call.run()) as frames:
            async for frame in frames:
                self.said.append(frame)

    async def stop(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        for replica in self.replicas:
            if replica.entry.is_up:
                await replica.stop()

    async def settled(self) -> None:
        """What is on its way has passed all of its sockets, one of them with each ping."""
        for _ in range(8):
            for replica in self.replicas:
                if replica.entry.is_up:
                    await replica.entry.client.ping(5.0)

    async def pass_time(self, seconds: float) -> None:
        """In steps that are shorter than a tick."""
        for _ in range(round(seconds / 0.02)):
            self.clock.advance(0.02)
            await self.settled()

    def hear(self, n: int) -> bool:
        return self.call.hear(np.full(N_SAMPLES, n, "<i2").tobytes())

    def values(self) -> list[int]:
        return [int(np.frombuffer(frame.pcm, "<i2")[0]) for frame in self.said]


@pytest.fixture
async def world(run_dir):
    made = World(run_dir)
    await made.start()
    yield made
    await made.stop()


async def test_every_frame_of_the_user_has_one_of_the_model(world):
    for n in range(1, 6):
        assert world.hear(n)
        await world.pass_time(FRAME_S)
    assert world.values() == [1, 2, 3, 4, 5]
    # The first frame has no sound: its text is that of the next one, too.
    assert [frame.text for frame in world.said] == ["begin 1 ", "2 ", "3 ", "4 ", "5 "]
    assert all(0 <= frame.latency_s <= FRAME_S for frame in world.said)
    assert world.deadlines.ended == dict.fromkeys(range(1, 6), "came")
    [talk] = world.talker.openers
    assert isinstance(talk, DuplexRequest)
    assert (talk.voice, talk.role, talk.seed, talk.window_frames) == ("v", "r", 3, 9)
    hear, sound = world.vocoder.openers
    assert isinstance(hear, HearRequest)
    assert sound.each_frame


async def test_nothing_steps_before_the_user_is_heard(world):
    await world.pass_time(1.0)
    assert (world.talker.heard, world.call.n_missing) == ([], 0)


async def test_a_frame_that_is_a_period_late_is_silence_and_then_dropped(world):
    world.hear(1)
    await world.pass_time(10 * FRAME_S)
    n = len(world.talker.heard) - 1
    assert 7 <= n <= world.call.n_missing <= 9
    assert world.talker.heard == [1] + [0] * n
    assert [frame.latency_s for frame in world.said[1:]] == [None] * n
    # All that the network has held back comes at once: what its periods do not take is dropped.
    taken = [world.hear(50 + k) for k in range(20)]
    assert sum(taken) <= MOST_EARLY + 3
    assert world.call.n_late == 20 - sum(taken)


async def test_a_user_who_goes_on_later_is_heard_at_once(world):
    world.hear(1)
    await world.pass_time(2.0)
    for n in range(40, 50):
        assert world.hear(n)
        await world.pass_time(FRAME_S)
    assert world.talker.heard[-9:] == list(range(41, 50))
    assert world.call.n_late == world.call.n_dropped == 0


async def test_several_frames_at_once_are_in_time(world):
    """Clients send 100 to 250 ms at a time."""
    for begin in range(1, 13, 3):
        assert all(world.hear(begin + k) for k in range(3))
        await world.pass_time(3 * FRAME_S)
    assert world.values() == list(range(1, 13))
    assert (world.call.n_missing, world.call.n_late) == (0, 0)


async def test_a_late_server_drops_frames_of_the_user_and_no_steps(world):
    world.talker.holds_at = 3
    heard = []
    for n in range(1, 21):
        heard += [n] if world.hear(n) else []
        await world.pass_time(FRAME_S)
    assert len(heard) == 3 + MOST_BEHIND
    assert world.call.n_dropped == 20 - len(heard)
    world.talker.release()
    await world.settled()
    # It steps back to back, and no frame that was taken is lost.
    assert world.values() == heard
    for n in range(30, 35):
        assert world.hear(n)
        await world.pass_time(FRAME_S)
    assert world.values() == [*heard, *range(30, 35)]
    assert world.call.n_missing == 0


@pytest.mark.parametrize("which", [0, 1])
async def test_after_a_stages_end_it_goes_on_behind_both_sides(world, which):
    for n in range(1, 6):
        world.hear(n)
        await world.pass_time(FRAME_S)
    assert world.hear(6)  # it is on its way, and lost
    await world.replicas[which].restart()
    await world.pass_time(1.0)
    again = world.talker.openers[-1]
    assert len(world.talker.openers) == 2
    own = np.frombuffer(again.own, "<i2").reshape(-1, 2)[:, 0].tolist()
    assert (own, again.n_frames) == ([0, 1, 2, 3, 4, 5], 6)
    assert np.frombuffer(again.heard, "<i2").tolist() == [1, 2, 3, 4, 5]
    for n in range(7, 12):
        assert world.hear(n)
        await world.pass_time(FRAME_S)
    assert world.values() == [1, 2, 3, 4, 5, *range(7, 12)]
    assert world.call.n_restarts == 1
    came = [n for n, how in world.deadlines.ended.items() if how == "came"]
    assert (len(came), world.deadlines.ended[6]) == (10, "failed")


async def test_frames_of_a_call_that_ends_are_not_waited_for(world):
    world.talker.holds_at = 1
    for n in range(1, 4):
        world.hear(n)
        await world.pass_time(FRAME_S)
    world._running.cancel()
    await asyncio.gather(world._running, return_exceptions=True)
    assert world.deadlines.ended == {1: "came", 2: "abandoned", 3: "abandoned"}


async def test_an_error_of_a_stage_ends_the_call(world):
    world.talker.fails_at = 1
    for n in range(1, 4):
        world.hear(n)
        await world.pass_time(FRAME_S)
    assert "talker is full" in str(world._running.exception())
    await world.settled()
    assert all(replica.server.n_jobs == 0 for replica in world.replicas)
