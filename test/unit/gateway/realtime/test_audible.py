"""Playback decides what is truncated and what the model sees of a response."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from sglang_live.core import TextPart
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.responses.audible import AudibleResponses
from test.unit.gateway.fakes import paced, spoken, types

from .playback_world import (
    DELTA,
    SILENCE_1S,
    STARTED,
    TRUNCATED,
    VOICE,
    WORDS,
    World,
    interrupted_end,
    next_history,
    start,
)


async def test_an_interruption_keeps_the_tokens_that_were_heard():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        item_id = await start(client)
        await world.play(client, 0.9)
        client.append(VOICE)
        events = await client.until(TRUNCATED)
        assert types(events)[0] == STARTED
        assert types(events)[-2] == "response.done"
        truncated = events[-1]
        assert (truncated["item_id"], truncated["content_index"]) == (item_id, 0)
        assert truncated["audio_end_ms"] == pytest.approx(900, abs=1)
        heard, user = await next_history(world, client)
        # 11 frames were heard, at about 3.7 frames a token.
        assert heard.token_ids == (1, 2, 3)
        assert heard.parts == (TextPart("one two three "),)
        assert user.role == "user"
        assert (world.session.n_interrupted, world.session.n_cancelled) == (1, 0)
    assert world.value("barge_ins_total") == 1
    assert world.value("stop_latency_seconds_count") == 1


async def test_the_next_turn_waits_for_the_tokens_of_the_interrupted_one():
    ending = asyncio.Event()
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        world.session.on_interrupt = [ending, interrupted_end()]
        await start(client)
        await world.play(client, 0.9)
        client.append(VOICE + SILENCE_1S)
        await client.until("response.created")
        await client.settle()
        assert len(world.orchestrator.turns) == 1
        ending.set()
        await client.until("response.done")
        assert world.orchestrator.turns[1].history[0].token_ids == (1, 2, 3)


async def test_without_the_policy_the_turn_is_cancelled_and_its_text_truncated_in_proportion():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        world.session.on_interrupt = None
        await start(client)
        await world.play(client, 0.8)
        client.append(VOICE)
        await client.until(TRUNCATED)
        heard = (await next_history(world, client))[0]
        assert heard.token_ids is None
        assert heard.parts == (TextPart("one two three four five"),)
        assert world.session.n_cancelled == 1


async def test_audio_that_was_not_sent_is_dropped_by_an_interruption():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        client.wire.audio_left = 5  # the sixth is then in the network's hands
        client.send("response.create")
        for _ in range(5):
            await client.until(DELTA)
        client.append(VOICE)
        async with asyncio.timeout(30):
            while not world.session.n_speech:
                await asyncio.sleep(0.001)
        client.wire.readable.set()
        events = await client.until("response.done")
        assert types(events[:2]) == [DELTA, STARTED]
        assert DELTA not in types(events[2:])
    assert world.value("audio_sent_seconds_total") == pytest.approx(6 * 0.08)
    assert world.value("audio_dropped_seconds_total") == pytest.approx(14 * 0.08)


async def test_a_response_that_only_plays_out_can_still_be_interrupted():
    world = World(paced(WORDS, 40), spoken("Yes?"))
    async with world.connect() as client:
        client.send("response.create")
        item = (await client.find("response.done"))["response"]["output"][0]
        await world.play(client, 1.6)
        client.append(VOICE)
        events = await client.until(TRUNCATED)
        assert types(events) == [STARTED, TRUNCATED]
        assert events[1]["item_id"] == item["id"]
        heard = (await next_history(world, client))[0]
        # Half of complete audio is half of its tokens.
        assert heard.token_ids == (1, 2, 3, 4, 5)
        assert heard.key != "reply:" + WORDS
    assert world.value("barge_ins_total") == 1


async def test_of_a_response_that_stalls_all_audio_that_was_sent_has_been_heard():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        await start(client)
        await world.play(client, 1.7)
        client.append(VOICE)
        events = await client.settle()
        assert STARTED in types(events)
        assert "response.done" in types(events)
        # The client has no audio to discard.
        assert TRUNCATED not in types(events)
        heard = (await next_history(world, client))[0]
        # 20 frames, at about 3.7 frames a token.
        assert heard.token_ids == (1, 2, 3, 4, 5)
    assert world.value("barge_ins_total") == 1


async def test_a_response_that_was_heard_to_its_end_stays_whole():
    world = World(paced(WORDS, 40), spoken("Yes?"))
    async with world.connect() as client:
        client.send("response.create")
        await client.until("response.done")
        await world.play(client, 3.3)
        client.append(VOICE)
        assert types(await client.settle()) == [STARTED]
        heard = (await next_history(world, client))[0]
        assert heard.key == "reply:" + WORDS
    assert world.value("barge_ins_total") == 0


async def test_two_responses_in_a_row_are_heard_one_after_the_other():
    world = World(paced(WORDS, 10), paced("later", 10), spoken("Yes?"))
    async with world.connect() as client:
        for _ in range(2):
            client.send("response.create")
            await client.until("response.done")
        await world.play(client, 0.4)
        client.append(VOICE)
        events = await client.settle()
        assert types(events) == [STARTED, TRUNCATED, TRUNCATED]
        assert [e["audio_end_ms"] for e in events[1:]] == [pytest.approx(400, abs=1), 0]
        history = await next_history(world, client)
        assert [item.role for item in history] == ["assistant", "user"]


async def test_a_turn_that_does_not_end_when_interrupted_is_cancelled():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        world.session.on_interrupt = [asyncio.Event()]
        await start(client)
        client.append(VOICE + SILENCE_1S)
        await client.until("response.created")
        await world.play(client, 4.9)
        assert len(world.orchestrator.turns) == 1
        world.clock.advance(0.2)
        assert (await client.find("response.done"))["response"]["status"] == "completed"
        assert world.session.n_cancelled == 1
        assert world.orchestrator.turns[1].history[0].role == "user"  # nothing was heard


async def test_a_turn_that_has_not_begun_is_not_the_one_to_interrupt():
    wind_down = asyncio.Event()
    world = World([asyncio.Event()], spoken("Third."))
    async with world.connect() as client:
        world.session.on_interrupt = None
        world.session.wind_down = wind_down
        for _ in range(2):
            client.send("response.create")
            await client.expect("response.created")
            await client.settle()
            client.send("response.cancel")
            await client.expect("response.done")
            # The first still winds down; a policy that is on must not keep the second alive.
            world.session.on_interrupt = [interrupted_end()]
        assert world.session.n_interrupted == 0
        wind_down.set()
        client.send("response.create")
        await client.until("response.done")
        assert len(world.orchestrator.turns) == 2


async def test_a_turn_over_other_context_is_cancelled_because_the_session_does_not_hold_it():
    world = World(paced(WORDS, 5, asyncio.Event()))
    async with world.connect() as client:
        client.send("response.create", response={"input": []})
        await client.until(DELTA)
        client.send("response.cancel")
        await client.until("response.done")
        await client.settle()
        assert (world.session.n_interrupted, world.session.n_cancelled) == (0, 1)


async def test_of_a_cancelled_response_all_audio_sent_counts_until_the_client_truncates():
    def script():
        return paced(WORDS, 20, asyncio.Event())

    world = World(script(), spoken("A."), spoken("B."))
    async with world.connect() as client:
        item_id = await start(client)
        client.send("response.cancel")
        assert TRUNCATED not in types(await client.settle())
        client.send("response.create")
        await client.until("response.done")
        assert world.orchestrator.turns[1].history[0].token_ids == (1, 2, 3, 4, 5)
        cut = {"item_id": item_id, "content_index": 0, "audio_end_ms": 400}
        client.send("conversation.item.truncate", **cut)
        client.send("response.create")
        await client.until("response.done")
        assert world.orchestrator.turns[2].history[0].token_ids == (1,)


async def test_a_response_that_was_not_heard_at_all_leaves_the_history():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        await start(client)
        client.append(VOICE)
        assert (await client.find(TRUNCATED))["audio_end_ms"] == 0
        assert [item.role for item in await next_history(world, client)] == ["user"]


async def test_a_failing_turn_after_its_interruption_leaves_the_text_that_was_heard():
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        world.session.on_interrupt = [RuntimeError("stage gone")]
        await start(client)
        await world.play(client, 0.8)
        client.append(VOICE)
        await client.until(TRUNCATED)
        heard = (await next_history(world, client))[0]
        assert heard.token_ids is None
        assert heard.parts == (TextPart("one two three four five"),)


async def test_playback_of_the_running_turn_is_reported_to_the_stages():
    world = World(paced(WORDS, 10, asyncio.Event()), spoken("Yes?"))
    async with world.connect() as client:
        await start(client)
        assert world.session.playback == [(0.0, False), (0.0, True)]
        await world.play(client, 1.0)
        heard_s, playing = world.session.playback[2]
        assert (heard_s, playing) == (pytest.approx(0.8), False)
        client.append(VOICE)
        await client.until("response.done")
        await next_history(world, client)
        # The next turn begins with the statistics of this user.
        assert (0.0, False) in world.session.playback


async def test_a_session_leaves_its_timeline(tmp_path):
    world = World(paced(WORDS, 20, asyncio.Event()), spoken("Yes?"), timeline_dir=tmp_path / "t")
    async with world.connect() as client:
        await start(client)
        await world.play(client, 0.8)
        client.append(VOICE + SILENCE_1S)
        await client.until(TRUNCATED)
        await client.until("response.done")
    document = json.loads((tmp_path / "t" / f"{world.session.session_id}.json").read_text())
    names = [event["event"] for event in document["events"]]
    for name in ("first_audio", "sent", "held", "speech_started", "barge_in", "turn_result"):
        assert name in names
    barge_in = next(e for e in document["events"] if e["event"] == "barge_in")
    assert (barge_in["heard_s"], barge_in["sent_s"]) == (0.8, 1.6)


async def test_a_timeline_that_cannot_be_written_is_only_logged(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    world = World(timeline_dir=blocked)
    async with world.connect():
        pass
    assert "timeline_lost" in caplog.text
    assert world.shared.metrics.timelines_lost._value.get() == 1


async def test_what_is_held_twice_is_released_whole():
    sent = []

    async def send(frame: str) -> None:
        sent.append(json.loads(frame)["type"])

    outbox = Outbox(send, limit_bytes=10_000)
    audible = AudibleResponses(outbox, None, None, None, None, None)
    sending = asyncio.create_task(outbox.drain())
    for response_id in ("one", "other"):
        audible._responses = [SimpleNamespace(id=response_id)]  # an older one has been played
        audible.hold()
        outbox.emit(response_id, lane=response_id)
    await asyncio.sleep(0)
    assert sent == []
    audible.release()
    outbox.close()
    await sending
    assert sent == ["one", "other"]
