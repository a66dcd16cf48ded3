"""The user speaks while a response is being made."""

import asyncio

from sglang_live.core import AudioDelta, TextPart, TranscriptDelta
from test.unit.gateway.fakes import FakeOrchestrator, connected, spoken, tone, types, voice

SILENCE_1S = bytes(48_000)


def running_response() -> list:
    """A response that never ends by itself."""
    return [
        TranscriptDelta("The history of the lighthouse "),
        TranscriptDelta("begins in Egypt"),
        AudioDelta(tone(1000)),
        asyncio.Event(),
    ]


async def start_response(client) -> str:
    client.send("response.create")
    events = await client.until("response.output_audio.delta")
    return events[1]["item"]["id"]


async def test_speech_ends_the_response_and_starts_the_next_turn():
    orchestrator = FakeOrchestrator([running_response(), spoken("Yes?")])
    async with connected(orchestrator) as client:
        await start_response(client)
        await client.settle()
        client.append(voice(500))
        client.append(SILENCE_1S)
        events = await client.until("response.created")
        assert types(events) == [
            "input_audio_buffer.speech_started",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
            "conversation.item.truncated",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
        ]
        ended = events[6]["response"]
        assert ended["status"] == "cancelled"
        assert ended["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        assert events[4]["item"]["status"] == "incomplete"
        assert (await client.find("response.done"))["response"]["status"] == "completed"
        assert orchestrator.session.n_cancelled == 1


async def test_a_response_interrupted_before_its_first_output_leaves_no_item():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate], spoken("Yes?")])
    async with connected(orchestrator) as client:
        client.send("response.create")
        await client.expect("response.created")
        await client.settle()
        client.append(voice(500) + SILENCE_1S)
        events = await client.until("response.done")
        assert types(events) == ["input_audio_buffer.speech_started", "response.done"]
        assert events[-1]["response"]["output"] == []
        await client.until("response.done")


async def test_no_event_of_a_response_follows_its_done():
    orchestrator = FakeOrchestrator([running_response(), spoken("Yes?")])
    async with connected(orchestrator) as client:
        client.send("response.create")
        old_id = (await client.expect("response.created"))["response"]["id"]
        await client.settle()
        client.append(voice(500) + SILENCE_1S)
        await client.until("response.done")
        after = await client.until("response.done")
        assert all(event.get("response_id") != old_id for event in after)


async def test_with_interrupt_response_off_the_response_goes_on_and_the_new_turn_waits_for_it():
    gate = asyncio.Event()
    steps = [TranscriptDelta("Long "), AudioDelta(tone(100)), gate, *spoken("story.")]
    orchestrator = FakeOrchestrator([steps, spoken("And to you.")])
    async with connected(orchestrator) as client:
        client.turn_detection({"interrupt_response": False})
        client.send("response.create")
        await client.until("response.output_audio.delta")
        client.append(voice(500) + SILENCE_1S)
        spoken_turn = await client.settle()
        assert types(spoken_turn) == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
        ]
        gate.set()
        assert (await client.find("response.done"))["response"]["status"] == "completed"
        await client.expect("response.created")
        assert (await client.find("response.done"))["response"]["status"] == "completed"
        roles = [item.role for item in orchestrator.turns[1].history]
        assert roles == ["assistant", "user"]


async def test_truncate_after_the_interruption_leaves_what_was_heard():
    orchestrator = FakeOrchestrator([running_response(), spoken("Yes?")])
    async with connected(orchestrator) as client:
        item_id = await start_response(client)
        await client.settle()
        client.append(voice(500))
        await client.until("conversation.item.truncated")
        cut = {"item_id": item_id, "content_index": 0, "audio_end_ms": 500}
        client.send("conversation.item.truncate", **cut)
        truncated = await client.expect("conversation.item.truncated")
        assert {key: truncated[key] for key in cut} == cut
        client.append(SILENCE_1S)
        await client.until("response.done")
        heard = orchestrator.turns[1].history[0]
        # Half of 45 characters, at a word boundary.
        assert heard.parts == (TextPart("The history of the"),)
        assert heard.token_ids is None


async def test_truncate_may_come_while_the_response_still_runs():
    gate = asyncio.Event()
    steps = [TranscriptDelta("one two "), AudioDelta(tone(400)), gate, AudioDelta(tone(400))]
    orchestrator = FakeOrchestrator([[*steps, *spoken("three four", 0)], spoken("Next.")])
    async with connected(orchestrator) as client:
        item_id = await start_response(client)
        await client.settle()
        client.send(
            "conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=400
        )
        await client.expect("conversation.item.truncated")
        gate.set()
        assert (await client.find("response.done"))["response"]["status"] == "completed"
        client.send("response.create")
        await client.until("response.done")
        heard = orchestrator.turns[1].history[0]
        assert heard.parts == (TextPart("one two"),)
        assert heard.token_ids is None


async def test_a_barge_in_of_pipecat_while_idle_costs_only_ignorable_errors():
    async with connected(FakeOrchestrator()) as client:
        client.turn_detection(None)
        await client.expect("session.updated")
        client.send("input_audio_buffer.clear")
        client.append(tone(200))
        client.send("response.cancel")
        events = await client.settle()
        assert types(events) == ["input_audio_buffer.cleared", "error"]
        assert events[1]["error"]["code"] == "response_cancel_not_active"
