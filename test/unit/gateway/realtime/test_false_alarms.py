"""A voice over a response that may be only a cough: hold, release, or interruption."""

import asyncio

import pytest

from sglang_live.core import AudioDelta, TranscriptDelta
from test.unit.gateway.fakes import paced, spoken, tone, types, voice

from .playback_world import COUGH, DELTA, SILENCE_1S, SILENCE_300MS, STARTED, WORDS, World, start


async def test_a_cough_holds_the_audio_and_then_releases_it():
    gate = asyncio.Event()
    steps = [TranscriptDelta("Well, ", 1), AudioDelta(tone(800)), gate, *paced("then", 5)]
    world = World(steps)
    async with world.connect() as client:
        await start(client)
        client.append(COUGH)
        assert await client.settle() == []
        gate.set()
        await asyncio.sleep(0.01)
        assert await client.settle() == []
        client.append(SILENCE_300MS)
        events = await client.until("response.done")
        assert STARTED not in types(events)
        assert types(events).count(DELTA) == 5
        assert events[-1]["response"]["status"] == "completed"
        assert world.session.n_speech == 1
    assert world.value("false_alarms_total") == 1
    assert world.value("barge_ins_total") == 0


async def test_a_voice_that_goes_on_is_a_barge_in_and_the_held_audio_is_dropped():
    gate = asyncio.Event()
    steps = [TranscriptDelta("Well, ", 1), AudioDelta(tone(400)), gate, AudioDelta(tone(400))]
    world = World([*steps, asyncio.Event()], spoken("Yes?"))
    async with world.connect() as client:
        await start(client)
        client.append(COUGH)
        await client.settle()
        gate.set()
        await asyncio.sleep(0.01)
        client.append(voice(100))
        events = await client.until("response.done")
        assert types(events)[0] == STARTED
        assert events[0]["audio_start_ms"] == 0
        assert DELTA not in types(events)
    assert world.value("audio_dropped_seconds_total") == pytest.approx(0.4)
    assert world.value("false_alarms_total") == 0


async def test_the_stages_learn_again_that_a_user_still_speaks():
    """Otherwise a long turn would lose the KV that it is about to need."""
    world = World(spoken("Yes?"))
    async with world.connect() as client:
        for _ in range(30):
            client.append(voice(500))
            await world.play(client, 0.5)
        began, told = 1, world.session.n_speech
        assert told == began + 3  # every 4 s of 15
        client.append(SILENCE_1S)
        await client.until("response.done")
        assert world.session.n_speech == told


async def test_with_the_window_off_the_first_onset_interrupts():
    world = World(paced(WORDS, 20, asyncio.Event()))
    async with world.connect() as client:
        client.turn_detection({"confirm_ms": 0})
        await client.until("session.updated")
        await start(client)
        client.append(COUGH)
        await client.expect(STARTED)
        await client.until("response.done")


async def test_while_nothing_is_audible_there_is_no_window():
    world = World([asyncio.Event()])
    async with world.connect() as client:
        client.send("response.create")
        await client.expect("response.created")
        client.append(COUGH)
        assert types(await client.until("response.done")) == [STARTED, "response.done"]
    assert world.value("barge_ins_total") == 0


async def test_with_interrupt_response_off_audio_is_neither_held_nor_stopped():
    gate = asyncio.Event()
    steps = [TranscriptDelta("Long ", 1), AudioDelta(tone(400)), gate, *paced("story", 5)]
    world = World(steps)
    async with world.connect() as client:
        client.turn_detection({"interrupt_response": False, "create_response": False})
        await client.until("session.updated")
        await start(client)
        client.append(COUGH)
        await client.expect(STARTED)
        gate.set()
        assert types(await client.until("response.done")).count(DELTA) == 5


@pytest.mark.parametrize("end", ["commit", "clear", "off"])
async def test_a_suspicion_that_will_not_be_settled_releases_the_audio(end):
    gate = asyncio.Event()
    steps = [TranscriptDelta("Well, ", 1), AudioDelta(tone(400)), gate, *paced("then", 5)]
    world = World(steps)
    async with world.connect() as client:
        await start(client)
        client.append(COUGH)
        await client.settle()
        gate.set()
        if end == "off":
            client.turn_detection(None)
        else:
            client.send(f"input_audio_buffer.{end}")
        assert types(await client.until("response.done")).count(DELTA) == 5
    assert world.value("false_alarms_total") == 0


async def test_a_client_that_stops_sending_during_a_suspicion_still_gets_the_response():
    gate = asyncio.Event()
    steps = [TranscriptDelta("Well, ", 1), AudioDelta(tone(400)), gate, *paced("then", 5)]
    world = World(steps)
    async with world.connect() as client:
        await start(client)
        client.append(COUGH)
        await client.settle()
        gate.set()
        # The client had 0.4 s to play, after which 0.3 s of silence are allowed.
        await world.play(client, 0.65)
        world.clock.advance(0.1)
        assert types(await client.until("response.done")).count(DELTA) == 5
