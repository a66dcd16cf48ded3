"""A turn without speech: the client gets its item, the model does not see it."""

import pytest

from sglang_live.core import AudioPart
from test.unit.gateway.fakes import FakeOrchestrator, connected, spoken, tone

SILENCE_1S = bytes(48_000)
KIND = "conversation.item.input_audio_transcription."


def audio_parts(turn) -> int:
    return sum(isinstance(part, AudioPart) for item in turn.history for part in item.parts)


@pytest.mark.parametrize("asked", [{}, {"response": {}}, {"response": {"instructions": None}}])
async def test_a_committed_silence_is_an_item_with_an_empty_response(asked):
    orchestrator = FakeOrchestrator([spoken("Close the shirt.")])
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        client.append(SILENCE_1S)
        client.send("input_audio_buffer.commit")
        assert (await client.find("conversation.item.done"))["item"]["role"] == "user"
        client.send("response.create", **asked)
        response = (await client.find("response.done"))["response"]
        assert (response["status"], response["output"]) == ("completed", [])
        assert response["usage"]["total_tokens"] == 0
        assert orchestrator.turns == []


async def test_its_transcript_is_empty():
    orchestrator = FakeOrchestrator([spoken("Close the shirt.")])
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        client.update(audio={"input": {"transcription": {"model": "whisper-1"}}})
        client.append(SILENCE_1S)
        client.send("input_audio_buffer.commit")
        assert (await client.find(KIND + "completed"))["transcript"] == ""
        assert orchestrator.turns == []


async def test_speech_after_a_silence_gets_a_response_without_the_silence_in_its_prompt():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        for audio in (SILENCE_1S, tone(500)):
            client.append(audio)
            client.send("input_audio_buffer.commit")
            await client.find("conversation.item.done")
        client.send("response.create")
        assert (await client.find("response.done"))["response"]["output"]
        [turn] = orchestrator.turns
        assert audio_parts(turn) == 1


async def test_a_response_with_instructions_of_its_own_speaks_all_the_same():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        client.append(SILENCE_1S)
        client.send("input_audio_buffer.commit")
        client.send("response.create", response={"instructions": "Ask whether they are there."})
        assert (await client.find("response.done"))["response"]["output"]
        [turn] = orchestrator.turns
        assert audio_parts(turn) == 0


async def test_text_after_a_silence_gets_a_response():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        client.append(SILENCE_1S)
        client.send("input_audio_buffer.commit")
        content = [{"type": "input_text", "text": "Hello?"}]
        item = {"type": "message", "role": "user", "content": content}
        client.send("conversation.item.create", item=item)
        client.send("response.create")
        assert (await client.find("response.done"))["response"]["output"]
