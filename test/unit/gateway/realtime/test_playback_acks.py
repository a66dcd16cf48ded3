"""playback.ack: the client reports what was heard."""

import asyncio

import pytest

from sglang_live.core import TextPart
from test.unit.gateway.fakes import paced, spoken, types

from .playback_world import TRUNCATED, VOICE, WORDS, World, next_history, start


def ack(client, item_id, audio_end_ms, **fields):
    client.send("playback.ack", item_id=item_id, audio_end_ms=audio_end_ms, **fields)


async def test_acks_decide_where_an_interrupted_response_is_truncated():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        item_id = await start(client)
        await world.play(client, 1.0)
        ack(client, item_id, 400)
        assert await client.settle() == []
        client.append(VOICE)
        assert (await client.find(TRUNCATED))["audio_end_ms"] == 400
        assert (await next_history(world, client))[0].token_ids == (1,)
    assert world.value("playback_acks_total", outcome="accepted") == 1


async def test_the_last_ack_may_come_after_the_interruption():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        item_id = await start(client)
        await world.play(client, 0.4)
        client.append(VOICE)
        await client.until(TRUNCATED)
        ack(client, item_id, 620)
        assert (await next_history(world, client))[0].token_ids == (1, 2)


async def test_the_acks_of_a_client_that_cancels_decide_what_was_heard():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        item_id = await start(client)
        await world.play(client, 1.0)
        ack(client, item_id, 400)
        client.send("response.cancel")
        assert (await client.find(TRUNCATED))["audio_end_ms"] == 400
        client.send("response.create")
        await client.until("response.done")
        assert world.orchestrator.turns[1].history[0].parts == (TextPart("one "),)


async def test_a_truncation_outweighs_acks():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        item_id = await start(client)
        await world.play(client, 1.0)
        client.append(VOICE)
        await client.until(TRUNCATED)
        cut = {"item_id": item_id, "content_index": 0, "audio_end_ms": 400}
        client.send("conversation.item.truncate", **cut)
        ack(client, item_id, 900)
        assert (await next_history(world, client))[0].token_ids == (1,)


async def test_an_ack_of_an_older_response_is_ignored_and_counted():
    world = World(paced(WORDS, 10), paced(WORDS, 10, asyncio.Event()))
    async with world.connect() as client:
        old_id = await start(client)
        await world.play(client, 1.0)
        await start(client)
        ack(client, old_id, 100)
        assert await client.settle() == []
    assert world.value("playback_acks_total", outcome="stale") == 1


async def test_wrong_acks_are_counted_and_have_no_effect():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        item_id = await start(client)
        await world.play(client, 0.4)
        ack(client, item_id, 86_400_000)
        ack(client, item_id, 1600)
        await client.settle()
        client.append(VOICE)
        assert (await client.find(TRUNCATED))["audio_end_ms"] <= 400 + 250
    assert world.value("playback_acks_total", outcome="beyond_sent") == 1
    assert world.value("playback_acks_total", outcome="too_fast") == 1


async def test_a_paused_client_is_reported_to_the_stages():
    world = World(paced(WORDS, 20, asyncio.Event()))
    async with world.connect() as client:
        item_id = await start(client)
        for _ in range(3):
            await world.play(client, 0.4)
            ack(client, item_id, 300)
        await client.settle()
        heard_s, playing = world.session.playback[-1]
        assert (heard_s, playing) == (pytest.approx(0.3), False)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"item_id": "gone"}, "item_ack_invalid_item_id", "item_id"),
        ({"audio_end_ms": -1}, "invalid_value", "audio_end_ms"),
        ({"audio_end_ms": 10**12}, "invalid_value", "audio_end_ms"),
        ({"audio_end_ms": 0.5}, "invalid_value", "audio_end_ms"),
        ({"item_id": None}, "invalid_type", "item_id"),
    ],
)
async def test_a_bad_ack_is_one_error(fields, code, param):
    world = World(paced(WORDS, 10, asyncio.Event()))
    async with world.connect() as client:
        event = {"item_id": await start(client), "audio_end_ms": 10, **fields}
        client.send("playback.ack", event_id="a1", **event)
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["param"], error["event_id"]) == (code, param, "a1")


async def test_an_ack_without_a_position_is_an_error():
    world = World()
    async with world.connect() as client:
        client.send("playback.ack", item_id="x")
        error = (await client.expect("error"))["error"]
        assert error["code"] == "missing_required_parameter"


async def test_an_ack_of_a_user_item_has_no_effect():
    world = World()
    async with world.connect() as client:
        client.say("hello", "mine")
        await client.until("conversation.item.done")
        ack(client, "mine", 10)
        assert types(await client.settle()) == []
