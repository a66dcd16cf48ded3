"""Speech at another speed: clients count seconds as they are played, tokens belong to speech as it
was made, and stages are told of both."""

import asyncio
import base64

import pytest

from sglang_live.core import TextPart
from test.unit.gateway.fakes import FakeOrchestrator, connected, paced, spoken

from .playback_world import DELTA, TRUNCATED, VOICE, WORDS, World, next_history, start
from .test_playback_acks import ack


def audio_ms(events) -> float:
    return sum(len(base64.b64decode(e["delta"])) for e in events if e["type"] == DELTA) / 48


def at(speed: float) -> dict:
    return {"audio": {"output": {"speed": speed}}}


async def test_the_speed_is_shown_and_lasts_until_it_is_changed():
    async with connected(FakeOrchestrator()) as client:
        for asked, shown in ((0.25, 0.25), (1.5, 1.5), (None, 1.0)):
            client.update(**at(asked))
            session = (await client.expect("session.updated"))["session"]
            assert session["audio"]["output"]["speed"] == shown


@pytest.mark.parametrize("speed", [0.5, 1.25])
async def test_a_response_has_its_length_at_that_speed_and_the_next_one_its_own(speed):
    world = World(paced(WORDS, 25), paced(WORDS, 25))
    async with world.connect() as client:
        client.update(**at(speed))
        for wanted_ms in (2000 / speed, 2000):
            client.send("response.create")
            assert audio_ms(await client.until("response.done")) == pytest.approx(wanted_ms, abs=1)
            client.update(**at(1))
            world.clock.advance(10.0)


async def test_an_interruption_keeps_the_words_of_the_speech_that_was_played():
    """1.0 s at 1.25 are 1.25 s of speech."""
    heard = {}
    for speed in (1.0, 1.25):
        world = World(paced(WORDS, 40, asyncio.Event()), spoken("Yes?"))
        async with world.connect() as client:
            client.update(**at(speed))
            await start(client)
            await world.play(client, 1.0 if speed == 1.25 else 1.25)
            client.append(VOICE)
            truncated = await client.find(TRUNCATED)
            heard[speed] = (await next_history(world, client))[0].parts
            assert truncated["audio_end_ms"] == pytest.approx(1250 / speed, abs=1)
    assert heard[1.0] == heard[1.25] != ()
    assert isinstance(heard[1.0][0], TextPart)


async def test_a_truncation_by_the_client_counts_played_milliseconds():
    kept = {}
    for speed, end_ms in ((1.0, 1200), (1.5, 800), (0.5, 2400)):
        world = World(paced(WORDS, 25), spoken("Yes?"))
        async with world.connect() as client:
            client.update(**at(speed))
            client.send("response.create")
            done = await client.find("response.done")
            item_id = done["response"]["output"][0]["id"]
            client.send(
                "conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=end_ms
            )
            await client.until(TRUNCATED)
            client.send("response.create")
            await client.until("response.done")
            kept[speed] = world.orchestrator.turns[-1].history[0]
    assert kept[1.0].token_ids == kept[1.5].token_ids == kept[0.5].token_ids
    assert 0 < len(kept[1.0].token_ids) < 10


async def test_stages_hear_of_speech_and_of_its_speed():
    world = World(paced(WORDS, 40, asyncio.Event()))
    async with world.connect() as client:
        client.update(**at(1.25))
        item_id = await start(client)
        for _ in range(3):
            await world.play(client, 0.4)
            ack(client, item_id, 400)
        await client.settle()
        heard_s, playing = world.session.playback[-1]
        assert (heard_s, playing) == (pytest.approx(0.5), False)
        assert set(world.session.speeds) == {1.25}
