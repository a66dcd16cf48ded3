"""Audio of the user: spoken turns, push-to-talk, and refusals."""

import asyncio
import base64

import numpy as np
import pytest

from sglang_live.clock import SimClock
from sglang_live.core import AudioDelta, AudioPart
from test.unit.gateway.fakes import FakeOrchestrator, connected, services, spoken, tone, types

# Background noise between words; LoudnessModel scores it as silence.
SILENCE_1S = bytes(48_000)


async def test_a_spoken_turn_follows_the_documented_sequence_under_one_item_id():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.append(SILENCE_1S)
        client.append(tone(600))
        client.append(SILENCE_1S)
        events = await client.until("response.done")
        assert types(events)[:6] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
        ]
        started, stopped, committed, added = events[:4]
        # Windows of 32 ms: the onset is found within one, the padding goes before it.
        assert 660 <= started["audio_start_ms"] <= 700
        assert 2060 <= stopped["audio_end_ms"] <= 2140
        ids = {started["item_id"], stopped["item_id"], committed["item_id"], added["item"]["id"]}
        assert len(ids) == 1
        assert committed["previous_item_id"] is None
        assert added["item"]["content"] == [{"type": "input_audio", "transcript": None}]
        (part,) = orchestrator.turns[0].history[0].parts
        heard_ms = stopped["audio_end_ms"] - started["audio_start_ms"]
        assert part.duration_s * 1000 == pytest.approx(heard_ms)


async def test_offsets_count_all_audio_of_the_session():
    async with connected(FakeOrchestrator()) as client:
        for turn in range(2):
            client.append(tone(500))
            client.append(SILENCE_1S)
            by_type = {event["type"]: event for event in await client.until("response.done")}
            stopped = by_type["input_audio_buffer.speech_stopped"]
            assert abs(stopped["audio_end_ms"] - (1500 * turn + 1000)) <= 64
            if turn:
                # The padding must not reach into the turn before.
                started = by_type["input_audio_buffer.speech_started"]
                assert started["audio_start_ms"] == pytest.approx(1200, abs=40)


async def test_many_small_appends_give_the_same_turn_as_one_long_one():
    async def turn(appends: list[bytes]):
        orchestrator = FakeOrchestrator()
        async with connected(orchestrator) as client:
            for pcm in appends:
                client.append(pcm)
            events = await client.until("response.done")
        (part,) = orchestrator.turns[0].history[0].parts
        return events[0]["audio_start_ms"], events[1]["audio_end_ms"], part.pcm

    audio = SILENCE_1S + tone(700) + SILENCE_1S
    whole = await turn([audio])
    small = await turn([audio[at : at + 482] for at in range(0, len(audio), 482)])
    assert whole[:2] == small[:2]
    assert np.array_equal(whole[2], small[2])


async def test_silence_never_starts_a_turn():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.update(audio={"input": {"turn_detection": {"threshold": 0.0}}})
        await client.expect("session.updated")
        for _ in range(5):
            client.append(SILENCE_1S)
        assert await client.settle() == []
        assert orchestrator.turns == []


async def test_a_click_does_not_start_a_turn():
    async with connected(FakeOrchestrator()) as client:
        for _ in range(3):
            client.append(tone(40) + SILENCE_1S)
        assert await client.settle() == []


async def test_create_response_false_commits_without_a_response():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.turn_detection({"create_response": False})
        await client.expect("session.updated")
        client.append(tone(500) + SILENCE_1S)
        events = await client.settle()
        assert types(events)[-1] == "conversation.item.done"
        assert orchestrator.turns == []


async def test_push_to_talk_commits_everything_and_responds_only_on_response_create():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        await client.expect("session.updated")
        client.append(tone(300))
        client.append(tone(700))
        client.send("input_audio_buffer.commit")
        events = await client.settle()
        assert types(events) == [
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
        ]
        client.send("response.create")
        await client.until("response.done")
        (part,) = orchestrator.turns[0].history[0].parts
        assert part.duration_s == pytest.approx(1.0)


@pytest.mark.parametrize("duration_ms", [0, 99])
async def test_a_commit_below_100_ms_is_the_error_that_clients_ignore(duration_ms):
    async with connected(FakeOrchestrator()) as client:
        client.turn_detection(None)
        await client.expect("session.updated")
        client.append(tone(duration_ms))
        client.send("input_audio_buffer.commit", event_id="c")
        error = (await client.expect("error"))["error"]
        assert error["code"] == "input_audio_buffer_commit_empty"
        assert error["event_id"] == "c"
        # Nothing was lost: the rest makes it long enough.
        client.append(tone(100 - duration_ms))
        client.send("input_audio_buffer.commit")
        await client.expect("input_audio_buffer.committed")


async def test_clear_drops_the_audio_but_not_the_time():
    async with connected(FakeOrchestrator()) as client:
        client.turn_detection(None)
        client.append(tone(1000))
        client.send("input_audio_buffer.clear")
        client.send("input_audio_buffer.commit")
        await client.until("input_audio_buffer.cleared")
        assert (await client.expect("error"))["error"]["code"] == "input_audio_buffer_commit_empty"
        client.turn_detection({})
        client.append(SILENCE_1S + tone(500))
        started = await client.find("input_audio_buffer.speech_started")
        assert started["audio_start_ms"] == pytest.approx(1700, abs=40)


async def test_clear_while_speaking_starts_over():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.append(tone(500))
        await client.expect("input_audio_buffer.speech_started")
        client.send("input_audio_buffer.clear")
        await client.expect("input_audio_buffer.speech_stopped")
        await client.expect("input_audio_buffer.cleared")
        client.append(SILENCE_1S)
        assert await client.settle() == []
        client.append(tone(500) + SILENCE_1S)
        started = await client.expect("input_audio_buffer.speech_started")
        committed = await client.find("input_audio_buffer.committed")
        assert started["item_id"] == committed["item_id"]
        await client.until("response.done")


async def test_switching_detection_off_during_speech_pairs_start_and_stop():
    async with connected(FakeOrchestrator()) as client:
        client.append(tone(500))
        started = await client.expect("input_audio_buffer.speech_started")
        client.turn_detection(None)
        stopped = await client.find("input_audio_buffer.speech_stopped")
        assert stopped["item_id"] == started["item_id"]


async def test_no_other_item_gets_the_id_of_the_turn_that_is_being_spoken():
    async with connected(FakeOrchestrator()) as client:
        client.append(tone(500))
        started = await client.expect("input_audio_buffer.speech_started")
        item = {"id": started["item_id"], "type": "message", "role": "user", "content": []}
        client.send("conversation.item.create", item=item)
        error = (await client.expect("error"))["error"]
        assert error["code"] == "item_create_duplicate_item_id"
        client.append(SILENCE_1S)
        committed = await client.find("input_audio_buffer.committed")
        assert committed["item_id"] == started["item_id"]
        await client.until("response.done")


async def test_a_commit_during_speech_pairs_start_and_stop():
    async with connected(FakeOrchestrator()) as client:
        client.append(tone(500))
        started = await client.expect("input_audio_buffer.speech_started")
        client.send("input_audio_buffer.commit")
        events = await client.settle()
        assert types(events)[:3] == [
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
        ]
        assert {e["item_id"] for e in events[:2]} == {started["item_id"]}
        assert "response.created" not in types(events)


@pytest.mark.parametrize(
    "audio",
    ["AAA", "####", "AAAA\n", "éé==", base64.b64encode(bytes(3)).decode()],
    ids=["unpadded", "alphabet", "newline", "not_ascii", "odd_bytes"],
)
async def test_bad_audio_is_one_error_and_adds_nothing(audio):
    async with connected(FakeOrchestrator()) as client:
        client.turn_detection(None)
        await client.expect("session.updated")
        client.append(tone(60))
        client.send("input_audio_buffer.append", audio=audio, event_id="bad")
        error = (await client.expect("error"))["error"]
        assert (error["event_id"], error["param"]) == ("bad", "audio")
        client.append(tone(60))
        client.send("input_audio_buffer.commit")
        await client.expect("input_audio_buffer.committed")


async def test_an_append_beyond_the_limit_is_an_error():
    async with connected(FakeOrchestrator(), max_append_bytes=4800) as client:
        client.append(bytes(4802))
        assert (await client.expect("error"))["error"]["code"] == "audio_too_large"


async def test_without_vad_a_full_buffer_refuses_more_until_it_is_committed():
    async with connected(FakeOrchestrator(), max_input_audio_s=2) as client:
        client.turn_detection(None)
        await client.expect("session.updated")
        client.append(tone(1500))
        client.append(tone(1000))
        assert (await client.expect("error"))["error"]["code"] == "input_audio_buffer_full"
        client.append(tone(500))
        client.send("input_audio_buffer.commit")
        await client.expect("input_audio_buffer.committed")
        client.append(tone(1000))
        assert types(await client.settle()) == ["conversation.item.added", "conversation.item.done"]


async def test_with_vad_old_silence_leaves_and_endless_speech_ends_its_turn():
    orchestrator = FakeOrchestrator()
    shared = services(orchestrator, max_input_audio_s=2)
    async with connected(orchestrator, shared) as client:
        for _ in range(6):
            client.append(SILENCE_1S)
        assert await client.settle() == []
        for _ in range(3):
            client.append(tone(1000))
        events = await client.until("response.done")
        assert types(events)[:3] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
        ]
    name = "sglang_live_gateway_input_audio_dropped_seconds_total"
    assert shared.metrics.registry.get_sample_value(name) == pytest.approx(4, abs=1.1)


async def test_an_hour_of_conversation_drops_its_oldest_items_and_reports_it():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator, max_conversation_bytes=100_000) as client:
        client.turn_detection(None)
        await client.expect("session.updated")
        deleted = []
        for _ in range(4):
            client.append(tone(1000))
            client.send("input_audio_buffer.commit")
            events = await client.settle()
            deleted += [e for e in events if e["type"] == "conversation.item.deleted"]
        assert len(deleted) == 2
        client.send("response.create")
        await client.until("response.done")
        assert len(orchestrator.turns[0].history) == 2


async def test_ttfp_from_speech_end_includes_the_silence_that_ended_the_turn():
    clock = SimClock()
    orchestrator = FakeOrchestrator()
    shared = services(orchestrator, clock)
    async with connected(orchestrator, shared) as client:
        client.append(tone(500) + bytes(24_000 * 2 * 6 // 10))
        await client.until("response.done")
    name = "sglang_live_gateway_ttfp_from_speech_end_seconds_sum"
    # The clock stood still, so all of it is audio: 600 ms of silence after the voice.
    assert shared.metrics.registry.get_sample_value(name) == pytest.approx(0.6, abs=0.04)


async def test_an_idle_user_gets_a_response_after_the_last_one_has_played_out():
    clock = SimClock()
    orchestrator = FakeOrchestrator([spoken("Hello?", 800), spoken("Are you there?")])
    async with connected(orchestrator, services(orchestrator, clock)) as client:
        client.turn_detection({"idle_timeout_ms": 5000})
        client.send("response.create")
        await client.until("response.done")
        client.append(SILENCE_1S * 6)
        clock.advance(5.7)  # the response plays for 0.8 s before the silence counts
        assert await client.settle() == []
        clock.advance(0.2)
        events = await client.until("response.done")
        assert types(events)[:4] == [
            "input_audio_buffer.timeout_triggered",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
        ]
        assert events[0]["audio_end_ms"] - events[0]["audio_start_ms"] == 5000
        heard = orchestrator.turns[1].history[-1].parts[0]
        assert isinstance(heard, AudioPart)


async def test_an_idle_timer_does_not_outlive_its_session():
    clock = SimClock()
    orchestrator = FakeOrchestrator([[AudioDelta(tone(100)), asyncio.Event()]])
    async with connected(orchestrator, services(orchestrator, clock)) as client:
        client.turn_detection({"idle_timeout_ms": 5000})
        client.send("response.create")
        await client.until("response.output_audio.delta")
    clock.advance(10.0)
    await asyncio.sleep(0.01)
    assert len(orchestrator.turns) == 1


async def test_buffered_audio_is_scored_when_detection_is_switched_on_during_speech():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        client.append(SILENCE_1S)
        client.append(tone(600))
        client.turn_detection({})
        client.append(tone(200))
        client.append(SILENCE_1S)
        events = await client.until("response.done")
        started = next(e for e in events if e["type"] == "input_audio_buffer.speech_started")
        assert 660 <= started["audio_start_ms"] <= 700
        (part,) = orchestrator.turns[0].history[0].parts
        assert part.duration_s > 1.1
