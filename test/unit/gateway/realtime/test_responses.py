"""One response: the exact order of its events, and the request of its turn."""

import asyncio
import gc
from itertools import groupby

import pytest

from sglang_live.core import AudioDelta, TranscriptDelta
from sglang_live.gateway.call.responses.writer import ActiveResponse
from test.unit.gateway.fakes import (
    FakeOrchestrator,
    audio_of,
    connected,
    done,
    services,
    spoken,
    tone,
    types,
)


async def test_a_text_turn_follows_the_documented_sequence():
    orchestrator = FakeOrchestrator([[TranscriptDelta("Good "), TranscriptDelta("day."), done()]])
    async with connected(orchestrator) as client:
        client.update(output_modalities=["text"])
        await client.expect("session.updated")
        client.say("Hello", "hello1")
        client.send("response.create", event_id="c1")
        events = await client.until("response.done")
        assert types(events) == [
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        by_type = {event["type"]: event for event in events}
        assert by_type["response.output_item.added"]["item"]["content"] == []
        assert by_type["response.output_item.added"]["item"]["status"] == "in_progress"
        assert by_type["response.content_part.added"]["part"] == {"type": "text", "text": ""}
        assert by_type["response.output_text.done"]["text"] == "Good day."
        assert by_type["response.content_part.done"]["part"]["type"] == "text"
        assert by_type["response.output_item.done"]["item"]["content"] == [
            {"type": "output_text", "text": "Good day."}
        ]
        assert by_type["conversation.item.done"]["previous_item_id"] == "hello1"
        assert orchestrator.turns[0].wants_audio is False


async def test_an_audio_turn_closes_audio_then_transcript_then_part_then_item():
    orchestrator = FakeOrchestrator([spoken("Nice to meet you.", 400)])
    async with connected(orchestrator) as client:
        client.send("response.create")
        events = await client.until("response.done")
        in_order = [kind for kind, _ in groupby(types(events))]
        assert in_order == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_audio_transcript.delta",
            "response.output_audio.delta",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        assert audio_of(events) == tone(80) * 5
        response = events[-1]["response"]
        assert response["status"] == "completed"
        assert response["output"][0]["content"] == [
            {"type": "output_audio", "transcript": "Nice to meet you."}
        ]
        assert response["usage"]["total_tokens"] == 15
        assert response["usage"]["input_token_details"]["cached_tokens"] == 2


async def test_all_events_of_a_response_carry_its_ids():
    async with connected(FakeOrchestrator()) as client:
        client.send("response.create")
        events = await client.until("response.done")
        response_id = events[0]["response"]["id"]
        item_id = events[1]["item"]["id"]
        for event in events:
            if event["type"].startswith("response.") and "response" not in event:
                assert event["response_id"] == response_id
            if "content_index" in event:
                assert event["item_id"] == item_id
        assert len({event["event_id"] for event in events}) == len(events)


@pytest.mark.parametrize(
    "metadata", [{"k" * 65: "v"}, {"k": "v" * 513}, {f"k{n}": "" for n in range(17)}]
)
async def test_metadata_is_bounded(metadata):
    async with connected(FakeOrchestrator()) as client:
        client.send("response.create", response={"metadata": metadata})
        assert (await client.expect("error"))["error"]["param"] == "response.metadata"


async def test_metadata_comes_back_in_created_and_done():
    async with connected(FakeOrchestrator()) as client:
        metadata = {"client_event_id": "abc"}
        client.send("response.create", response={"metadata": metadata})
        events = await client.until("response.done")
        assert events[0]["response"]["metadata"] == metadata
        assert events[-1]["response"]["metadata"] == metadata


async def test_settings_of_response_create_hold_for_that_response_only():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.update(instructions="Session.", max_output_tokens=50)
        form = {
            "instructions": "Only now.",
            "max_output_tokens": 7,
            "output_modalities": ["text"],
            "temperature": 0,
        }
        client.send("response.create", response=form)
        await client.until("response.done")
        client.send("response.create", response={"instructions": None})
        await client.until("response.done")
        first, second = orchestrator.turns
        assert (first.instructions, first.max_output_tokens) == ("Only now.", 7)
        assert (first.wants_audio, first.temperature) == (False, 0)
        assert (second.instructions, second.max_output_tokens) == ("Session.", 50)
        assert (second.wants_audio, second.temperature) == (True, None)


async def test_the_next_turn_has_the_item_that_the_model_generated():
    orchestrator = FakeOrchestrator([spoken("First answer."), spoken("Second.")])
    async with connected(orchestrator) as client:
        for text in ("one", "two"):
            client.say(text)
            client.send("response.create")
            await client.until("response.done")
        roles = [item.role for item in orchestrator.turns[1].history]
        assert roles == ["user", "assistant", "user"]
        reply = orchestrator.turns[1].history[1]
        assert reply.key == "reply:First answer."
        assert reply.token_ids == (1, 2, 3)
        # The first item is the same object, so its key is the same.
        assert orchestrator.turns[0].history[0] is orchestrator.turns[1].history[0]


async def test_items_added_during_a_turn_come_after_its_item():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, *spoken("To the first.")]])
    async with connected(orchestrator) as client:
        client.say("first", "first")
        client.send("response.create")
        await client.until("response.created")
        client.say("second", "second")
        await client.until("conversation.item.done")
        gate.set()
        reply = await client.find("conversation.item.added")
        assert reply["previous_item_id"] == "first"
        await client.until("response.done")
        client.send("response.create")
        await client.until("response.done")
        texts = [item.parts[0].text for item in orchestrator.turns[1].history]
        assert texts == ["first", "To the first.", "second"]


async def test_a_second_response_is_refused_while_one_is_active():
    gate = asyncio.Event()
    async with connected(FakeOrchestrator([[gate, *spoken("Slow.")]])) as client:
        client.send("response.create")
        client.send("response.create", event_id="again")
        await client.expect("response.created")
        error = (await client.expect("error"))["error"]
        assert error["code"] == "conversation_already_has_active_response"
        assert error["event_id"] == "again"
        gate.set()
        assert (await client.find("response.done"))["response"]["status"] == "completed"


async def test_a_slow_response_does_not_delay_events_of_the_client():
    gate = asyncio.Event()
    async with connected(FakeOrchestrator([[gate, *spoken("Slow.")]])) as client:
        client.send("response.create")
        await client.expect("response.created")
        client.say("still here")
        await client.expect("conversation.item.added")
        gate.set()
        await client.until("response.done")


async def test_out_of_band_responses_run_beside_the_conversation_and_leave_no_item():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, *spoken("Main.")], spoken("Side.")])
    async with connected(orchestrator) as client:
        client.say("context", "ctx")
        client.send("response.create")
        await client.until("response.created")
        await client.settle()
        side_input = [
            {"type": "item_reference", "id": "ctx"},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "classify"}],
            },
        ]
        form = {"conversation": "none", "input": side_input, "metadata": {"topic": "side"}}
        client.send("response.create", response=form)
        events = await client.until("response.done")
        assert "conversation.item.added" not in types(events)
        assert events[-1]["response"]["conversation_id"] is None
        assert events[-1]["response"]["metadata"] == {"topic": "side"}
        gate.set()
        assert (await client.find("response.done"))["response"]["conversation_id"]
        main, side = orchestrator.turns
        assert (main.stateless, side.stateless) == (False, True)
        assert [item.parts[0].text for item in side.history] == ["context", "classify"]


async def test_an_out_of_band_response_without_input_sees_the_conversation():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.say("context")
        client.send("response.create", response={"conversation": "none"})
        await client.until("response.done")
        client.send("response.create", response={"conversation": "none", "input": []})
        await client.until("response.done")
        with_history, without = orchestrator.turns
        assert len(with_history.history) == 1
        assert without.history == ()


async def test_out_of_band_responses_are_limited_and_can_be_cancelled_by_id():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate], [gate]])
    async with connected(orchestrator, max_out_of_band_responses=2) as client:
        for _ in range(3):
            client.send("response.create", response={"conversation": "none"})
        first = (await client.expect("response.created"))["response"]["id"]
        await client.expect("response.created")
        assert (await client.expect("error"))["error"]["code"] == "too_many_responses"
        client.send("response.cancel")  # names none, and the conversation has none
        assert (await client.expect("error"))["error"]["code"] == "response_cancel_not_active"
        client.send("response.cancel", response_id=first)
        assert (await client.expect("response.done"))["response"]["id"] == first


async def test_all_sessions_share_the_slots_of_out_of_band_responses():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate], [gate], [gate]])
    shared = services(orchestrator, max_out_of_band_responses_in_all=2)
    async with connected(orchestrator, shared) as one:
        for _ in range(2):
            one.send("response.create", response={"conversation": "none"})
            await one.expect("response.created")
        async with connected(orchestrator, shared) as other:
            other.send("response.create", response={"conversation": "none"})
            assert (await other.expect("error"))["error"]["code"] == "too_many_responses"
    assert shared.out_of_band_slots.n_taken == 0
    async with connected(orchestrator, shared) as other:
        other.send("response.create", response={"conversation": "none"})
        await other.expect("response.created")


@pytest.mark.parametrize(
    "form",
    [
        {"conversation": "both"},
        {"input": [{"type": "item_reference", "id": "nowhere"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]},
        {"metadata": {str(n): "x" for n in range(17)}},
        {"output_modalities": []},
        {"max_output_tokens": 5000},
    ],
)
async def test_a_bad_response_create_is_one_error_with_the_clients_event_id(form):
    async with connected(FakeOrchestrator()) as client:
        client.send("response.create", event_id="c7", response=form)
        error = (await client.expect("error"))["error"]
        assert error["event_id"] == "c7"
        assert error["param"].startswith("response.")
        assert await client.settle() == []


async def test_telephone_audio_is_sent_in_its_own_format_and_frame_lengths():
    orchestrator = FakeOrchestrator([[AudioDelta(tone(1000)), AudioDelta(tone(5)), done("x")]])
    async with connected(orchestrator) as client:
        client.update(audio={"output": {"format": {"type": "audio/pcmu"}}})
        client.send("response.create")
        events = await client.until("response.done")
        assert len(audio_of(events)) == 8 * 1005
        sizes = [len(audio_of([e])) for e in events if e["type"] == "response.output_audio.delta"]
        assert max(sizes) <= 8 * 200
        assert min(sizes[:-1]) >= 8 * 20


async def test_ttfp_is_measured_when_the_first_audio_was_sent():
    orchestrator = FakeOrchestrator()
    shared = services(orchestrator)
    async with connected(orchestrator, shared) as client:
        client.send("response.create")
        await client.until("response.done")
    registry = shared.metrics.registry
    name = "sglang_live_gateway_ttfp_from_decision_seconds_count"
    assert registry.get_sample_value(name) == 1
    turns = "sglang_live_gateway_turns_total"
    assert registry.get_sample_value(turns, {"status": "completed", "reason": ""}) == 1
    tokens = [f"sglang_live_gateway_prompt_tokens{which}_total" for which in ("", "_cached")]
    assert [registry.get_sample_value(name) for name in tokens] == [12, 2]
    assert registry.get_sample_value("sglang_live_gateway_responses_active") == 0
    assert registry.get_sample_value("sglang_live_gateway_sessions_open") == 0


async def test_items_after_response_create_are_not_in_its_turn():
    """All events are sent at once: the turn has the items before its response.create."""
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.say("Before.", "item_before")
        client.send("response.create")
        client.say("Behind.", "item_behind")
        client.send("response.create", response={"conversation": "none"})
        events = await client.until("response.done") + await client.until("response.done")
        heard = [[item.parts[0].text for item in turn.history] for turn in orchestrator.turns]
        assert heard == [["Before."], ["Before.", "Behind."]]
        added = [e for e in events if e["type"] == "conversation.item.added"]
        places = {e["item"]["role"]: e["previous_item_id"] for e in added}
        assert places["assistant"] == "item_before"


async def test_a_response_that_has_ended_keeps_none_of_the_items_before_it():
    orchestrator = FakeOrchestrator([spoken("Yes.", 80)])
    async with connected(orchestrator) as client:
        client.say("Hello.", "hello1")
        client.send("response.create")
        await client.until("response.done")
        assert orchestrator.turns[0].history
        await client.settle()
        # The items of its turn are held by its task alone.
        ended = [each for each in gc.get_objects() if isinstance(each, ActiveResponse)]
        assert ended and not any(response.task for response in ended)


async def test_items_deleted_after_response_create_are_not_in_its_turn():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.say("One.", "item_1")
        client.say("Two.", "item_2")
        client.send("response.create")
        client.send("conversation.item.delete", item_id="item_1")
        await client.until("response.done")
        [turn] = orchestrator.turns
        assert [item.parts[0].text for item in turn.history] == ["Two."]


async def test_no_response_has_another_voice_after_the_first_audio():
    async with connected(FakeOrchestrator()) as client:
        client.send("response.create")
        await client.until("response.done")
        client.send("response.create", response={"audio": {"output": {"voice": "bob"}}})
        error = (await client.expect("error"))["error"]
        assert error["code"] == "cannot_update_voice"
        assert error["param"] == "response.audio.output.voice"
        client.send("response.create", response={"audio": {"output": {"voice": "ada"}}})
        await client.until("response.done")
