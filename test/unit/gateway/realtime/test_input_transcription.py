"""Transcripts of the user's speech, made after the first audio of the response."""

import asyncio

import pytest

from sglang_live.aio import failed_tasks
from sglang_live.core import AudioDelta, AudioPart, TextPart, TranscriptDelta
from sglang_live.errors import StageUnavailableError
from sglang_live.gateway.call.turns import input_transcription
from test.unit.gateway.fakes import FakeOrchestrator, connected, done, services, spoken, tone, types

SILENCE_1S = bytes(48_000)
KIND = "conversation.item.input_audio_transcription."


def written(*deltas: str) -> list:
    return [*(TranscriptDelta(delta) for delta in deltas), done("".join(deltas))]


def of_kind(events: list[dict], what: str) -> list[dict]:
    return [event for event in events if event["type"] == KIND + what]


def ask(client, **wish) -> None:
    wish = {"model": "whisper-1", **wish}
    client.update(audio={"input": {"transcription": wish}})


async def test_the_transcript_comes_in_deltas_and_then_whole():
    orchestrator = FakeOrchestrator([spoken("Yes."), written("Is it", " raining?")])
    async with connected(orchestrator) as client:
        ask(client)
        client.append(tone(500) + SILENCE_1S)
        events = await client.until(KIND + "completed")
        assert [e["delta"] for e in of_kind(events, "delta")] == ["Is it", " raining?"]
        end = events[-1]
        assert (end["transcript"], end["content_index"]) == ("Is it raining?", 0)
        [committed] = [e for e in events if e["type"] == "input_audio_buffer.committed"]
        assert end["item_id"] == committed["item_id"]
        assert end["usage"]["seconds"] == pytest.approx(1.0, abs=0.1)
        client.send("conversation.item.retrieve", item_id=end["item_id"])
        item = (await client.find("conversation.item.retrieved"))["item"]
        assert item["content"][0]["transcript"] == "Is it raining?"


async def test_a_transcript_is_made_by_a_stateless_turn():
    orchestrator = FakeOrchestrator([spoken("Yes."), written("Ja?")])
    async with connected(orchestrator) as client:
        ask(client, language="de", prompt="Regen")
        client.append(tone(500) + SILENCE_1S)
        await client.until(KIND + "completed")
        response, transcript = orchestrator.turns
        assert transcript.stateless and not transcript.wants_audio
        assert (transcript.temperature, transcript.instructions) == (0.0, "")
        [item] = transcript.history
        audio, asked = item.parts
        assert isinstance(audio, AudioPart) and isinstance(asked, TextPart)
        assert audio.pcm is response.history[0].parts[0].pcm
        assert "de" in asked.text and "Regen" in asked.text
        # The next turn does not contain it.
        client.append(tone(500) + SILENCE_1S)
        await client.until(KIND + "completed")
        users = [item for item in orchestrator.turns[2].history if item.role == "user"]
        assert [len(item.parts) for item in users] == [1, 1]


async def test_the_first_audio_of_the_response_goes_first():
    first_sound, rest = asyncio.Event(), asyncio.Event()
    response = [first_sound, AudioDelta(tone(80)), rest, done("Yes.")]
    orchestrator = FakeOrchestrator([response, written("Hello.")])
    async with connected(orchestrator) as client:
        ask(client)
        client.append(tone(500) + SILENCE_1S)
        await client.until("response.created")
        assert of_kind(await client.settle(), "completed") == []
        assert len(orchestrator.turns) == 1
        first_sound.set()
        # It does not wait for the end of the response.
        events = await client.until(KIND + "completed")
        assert "response.done" not in types(events)
        rest.set()
        await client.until("response.done")


async def test_push_to_talk_is_transcribed_at_once():
    orchestrator = FakeOrchestrator([written("Hello.")])
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        ask(client)
        client.append(tone(500))
        client.send("input_audio_buffer.commit")
        assert (await client.find(KIND + "completed"))["transcript"] == "Hello."
        assert len(orchestrator.turns) == 1


@pytest.mark.parametrize(
    ("fault", "code"),
    [(StageUnavailableError("thinker/0 is down"), "stage_unavailable"), (KeyError("a bug"), None)],
)
async def test_a_failed_transcription_is_reported(fault, code):
    orchestrator = FakeOrchestrator([spoken("Yes."), [fault], spoken("Yes."), written("Hello.")])
    shared = services(orchestrator)
    async with connected(orchestrator, shared) as client:
        ask(client)
        client.append(tone(500) + SILENCE_1S)
        failed = await client.find(KIND + "failed")
        assert failed["error"]["code"] == (code or "internal_error")
        assert "a bug" not in failed["error"]["message"]
        # The next one is written down as ever.
        client.append(tone(500) + SILENCE_1S)
        assert (await client.find(KIND + "completed"))["transcript"] == "Hello."
    count = shared.metrics.registry.get_sample_value
    name = "sglang_live_gateway_transcripts_total"
    assert count(name, {"outcome": "failed"}) == count(name, {"outcome": "completed"}) == 1


async def test_a_worker_that_failed_is_replaced(monkeypatch):
    orchestrator = FakeOrchestrator([spoken("Yes."), [KeyError("a bug")], *[spoken("Yes.")] * 2])
    n_failed = failed_tasks.n_by_name["user transcripts"]
    async with connected(orchestrator) as client:
        ask(client)
        with monkeypatch.context() as broken:
            broken.setattr(input_transcription, "internal_error", lambda: 1 / 0)
            client.append(tone(500) + SILENCE_1S)
            await client.find("response.done")
            async with asyncio.timeout(10):
                while failed_tasks.n_by_name["user transcripts"] == n_failed:
                    await asyncio.sleep(0.01)
        assert failed_tasks.n_by_name["user transcripts"] == n_failed + 1
        client.append(tone(500) + SILENCE_1S)
        assert (await client.find(KIND + "completed"))["transcript"] == "Yes."


async def test_if_turns_come_too_fast_the_oldest_transcriptions_fail():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, *written("first")], *[written("later")] * 9])
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        ask(client)
        for n in range(10):
            client.append(tone(200))
            client.send("input_audio_buffer.commit")
            if n == 0:
                await client.settle()  # the first one is being written
        failed = await client.find(KIND + "failed")
        gate.set()
        for _ in range(9):
            assert (await client.find(KIND + "completed"))["item_id"] != failed["item_id"]


async def test_the_end_of_a_session_leaves_no_transcription_running():
    never = asyncio.Event()
    orchestrator = FakeOrchestrator([[never]])
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        ask(client)
        client.append(tone(200))
        client.send("input_audio_buffer.commit")
        await client.find("conversation.item.done")
        async with asyncio.timeout(30):
            while not orchestrator.turns:  # the speech in it is looked for in a thread
                await asyncio.sleep(0.001)
        await client.settle()
    assert orchestrator.session.n_cancelled == 1
