"""A client that stops sending while its user speaks."""

import pytest

from test.unit.gateway.fakes import spoken, types, voice

from .playback_world import SILENCE_1S, STARTED, VOICE, World

STOPPED = "input_audio_buffer.speech_stopped"


@pytest.fixture
def world():
    return World(spoken("Yes?"), spoken("Go on."))


async def wait(world, client, seconds: float) -> list[dict]:
    """The events of a time in which the client sends no audio."""
    events = []
    for _ in range(round(10 * seconds)):
        world.clock.advance(0.1)
        events += await client.settle()
    return events


async def test_a_turn_ends_when_no_more_audio_comes(world):
    async with world.connect() as client:
        client.append(VOICE)
        await client.expect(STARTED)
        assert await wait(world, client, 1.9) == []
        events = await wait(world, client, 0.5)
        assert types(events)[:2] == [STOPPED, "input_audio_buffer.committed"]
        assert events[0]["audio_end_ms"] <= 500
        assert "response.done" in types(events)
        [item] = world.orchestrator.turns[0].history
        assert item.parts[0].duration_s == pytest.approx(0.5, abs=0.05)
    assert world.value("turn_ends_total", reason="no_audio") == 1


async def test_a_turn_that_goes_on_in_time_is_one_turn(world):
    async with world.connect() as client:
        client.append(VOICE)
        await client.expect(STARTED)
        for _ in range(3):
            assert await wait(world, client, 1.5) == []
            client.append(voice(300))
        client.append(SILENCE_1S)
        assert types(await client.until("response.done")).count(STOPPED) == 1
        assert await wait(world, client, 5) == []
    assert world.value("turn_ends_total", reason="no_audio") is None


async def test_a_longer_silence_that_the_client_asks_for_is_waited_for(world):
    async with world.connect() as client:
        client.turn_detection({"silence_duration_ms": 4000})
        await client.until("session.updated")
        client.append(VOICE)
        await client.expect(STARTED)
        assert await wait(world, client, 3.9) == []
        assert STOPPED in types(await wait(world, client, 0.5))


@pytest.mark.parametrize("end", ["input_audio_buffer.clear", "input_audio_buffer.commit"])
async def test_a_turn_that_the_client_ends_is_not_ended_again(world, end):
    async with world.connect() as client:
        client.append(VOICE)
        await client.expect(STARTED)
        client.send(end)
        await client.expect(STOPPED)
        await client.settle()
        assert STOPPED not in types(await wait(world, client, 5))
    assert world.value("turn_ends_total", reason="no_audio") is None


async def test_the_next_turn_after_a_stall_is_a_turn_of_its_own(world):
    async with world.connect() as client:
        client.append(VOICE)
        await client.expect(STARTED)
        assert "response.done" in types(await wait(world, client, 2.5))
        client.append(VOICE + SILENCE_1S)
        assert STARTED in types(await client.until("response.done"))
    assert len(world.orchestrator.turns) == 2
