"""Audio held back at its beginning: when it leaves, and that all of it does."""

import asyncio
from contextlib import aclosing

import pytest

from sglang_live.clock import SimClock
from sglang_live.core import OUTPUT_RATE_HZ, AudioDelta
from sglang_live.orchestrator.startup_delay import StartupDelays

pytestmark = pytest.mark.asyncio


def chunk(duration_s: float, value: int = 1) -> bytes:
    return bytes([value]) * round(2 * OUTPUT_RATE_HZ * duration_s)


class FakeVocoder:
    """Delivers what the test puts in."""

    def __init__(self):
        self.queue: asyncio.Queue = asyncio.Queue()
        self.closed = False

    async def audio(self):
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield AudioDelta(item)
        finally:
            self.closed = True


class Reply:
    """One reply under way; `sounds` are (time, bytes) as they leave."""

    def __init__(self, clock: SimClock, delays: StartupDelays):
        self.clock, self.vocoder, self.sounds = clock, FakeVocoder(), []
        self.task = asyncio.create_task(self._listen(delays))

    async def _listen(self, delays: StartupDelays) -> None:
        async with aclosing(delays.delayed(self.vocoder.audio())) as chunks:
            async for chunk in chunks:
                self.sounds.append((self.clock.now_s(), chunk.pcm))

    async def make(self, pcm) -> None:
        self.vocoder.queue.put_nowait(pcm)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def pass_time(clock: SimClock, seconds: float) -> None:
    clock.advance(seconds)
    await settle()


async def late_reply(clock: SimClock, delays: StartupDelays, late_s: float) -> None:
    reply = Reply(clock, delays)
    await reply.make(chunk(0.16))
    await pass_time(clock, 0.16 + late_s)
    await reply.make(chunk(0.32))
    await reply.make(None)
    await reply.task


async def test_audio_is_not_withheld_where_responses_were_in_time():
    clock = SimClock(100.0)
    delays = StartupDelays(clock)
    await late_reply(clock, delays, -0.05)
    reply = Reply(clock, delays)
    await reply.make(chunk(0.16))
    assert [pcm for _, pcm in reply.sounds] == [chunk(0.16)]
    await reply.make(None)
    await reply.task


async def test_sound_waits_as_long_as_the_reply_before_was_late_less_what_a_player_hides():
    clock = SimClock(100.0)
    delays = StartupDelays(clock)
    await late_reply(clock, delays, 0.18)
    assert delays.delay_s(0) == pytest.approx(0.1)
    reply = Reply(clock, delays)
    began_s = clock.now_s()
    await reply.make(chunk(0.16))
    await pass_time(clock, 0.09)
    assert not reply.sounds
    await pass_time(clock, 0.02)
    assert [at_s - began_s for at_s, _ in reply.sounds] == [pytest.approx(0.11)]
    await reply.make(None)
    await reply.task


async def test_enough_audio_ends_the_wait():
    clock = SimClock(100.0)
    delays = StartupDelays(clock)
    await late_reply(clock, delays, 0.3)
    reply = Reply(clock, delays)
    for _ in range(3):
        await reply.make(chunk(0.16))
    assert len(reply.sounds) == 3
    await reply.make(None)
    await reply.task


async def test_a_short_reply_is_heard_whole():
    clock = SimClock(100.0)
    delays = StartupDelays(clock)
    await late_reply(clock, delays, 0.3)
    reply = Reply(clock, delays)
    await reply.make(chunk(0.1))
    await reply.make(None)
    await reply.task
    assert b"".join(pcm for _, pcm in reply.sounds) == chunk(0.1)


async def test_a_response_that_begins_alone_does_not_wait_for_lateness_under_load():
    clock = SimClock(100.0)
    delays = StartupDelays(clock)
    await late_reply(clock, delays, 0.0)
    others = [Reply(clock, delays) for _ in range(3)]
    for reply in others:
        await reply.make(chunk(0.16))
    await late_reply(clock, delays, 0.2)
    assert (delays.delay_s(0), delays.delay_s(3)) == (0.0, pytest.approx(0.12))
    for reply in others:
        await reply.make(None)
        await reply.task
    alone = Reply(clock, delays)
    await alone.make(chunk(0.16))
    assert alone.sounds
    await alone.make(None)
    await alone.task


async def test_old_lateness_does_not_count():
    clock = SimClock(100.0)
    delays = StartupDelays(clock)
    await late_reply(clock, delays, 0.3)
    await pass_time(clock, 100.0)
    assert delays.delay_s(0) == 0.0


async def test_an_error_of_the_vocoder_comes_through_after_what_it_made():
    clock = SimClock(100.0)
    reply = Reply(clock, StartupDelays(clock))
    await reply.make(chunk(0.16))
    await reply.make(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        await reply.task
    assert len(reply.sounds) == 1
    assert reply.vocoder.closed


async def test_leaving_early_closes_the_source():
    clock = SimClock(100.0)
    delays = StartupDelays(clock)
    await late_reply(clock, delays, 0.3)
    reply = Reply(clock, delays)
    await reply.make(chunk(0.16))
    reply.task.cancel()
    await asyncio.gather(reply.task, return_exceptions=True)
    await settle()
    assert reply.vocoder.closed


async def test_a_client_that_takes_one_chunk_lets_the_vocoder_give_a_few():
    given = []

    async def endless():
        while True:
            given.append(1)
            yield AudioDelta(chunk(0.08))

    async with aclosing(StartupDelays(SimClock(100.0)).delayed(endless())) as chunks:
        await anext(chunks)
        await settle()
        assert len(given) <= 10
        for _ in range(30):
            await anext(chunks)
        await settle()
        assert len(given) <= 40


async def test_a_client_that_takes_its_time_is_no_lateness_of_the_vocoder():
    clock = SimClock(100.0)
    delays = StartupDelays(clock)
    vocoder = FakeVocoder()
    for _ in range(30):
        vocoder.queue.put_nowait(chunk(0.08))
    vocoder.queue.put_nowait(None)
    async for _ in delays.delayed(vocoder.audio()):
        await pass_time(clock, 0.5)
    assert delays.delay_s(0) == 0.0
