"""With a recogniser, transcripts grow while the user speaks."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from sglang_live.core import INPUT_RATE_HZ, AudioPart
from sglang_live.errors import StageFailedError
from test.unit.gateway.fakes import FakeOrchestrator, connected, spoken, tone, types
from test.unit.gateway.realtime.test_input_transcription import KIND, SILENCE_1S, of_kind, written

# A pause in which the turn goes on, and speech before it of a length that is kept.
PAUSE = SILENCE_1S[:14_400]
LONG = tone(3500) + PAUSE
TRANSCRIPTION = {"model": "whisper-1"}
COMMITTED = "input_audio_buffer.committed"


@asynccontextmanager
async def speaking(*scripts: list, detection: dict | None = None, **config):
    """A client that has just begun to speak, and its orchestrator."""
    orchestrator = FakeOrchestrator(list(scripts))
    async with connected(orchestrator, prefills_at_pauses=True, **config) as client:
        detection = detection or {"type": "server_vad"}
        settings = {"transcription": TRANSCRIPTION, "turn_detection": detection}
        client.update(audio={"input": settings})
        await client.expect("session.updated")
        client.append(tone(500))
        await client.expect("input_audio_buffer.speech_started")
        yield client, orchestrator


def seconds_transcribed(orchestrator: FakeOrchestrator) -> list[list[float]]:
    """Lengths of the clips of each transcription."""
    return [
        [len(p.pcm) / INPUT_RATE_HZ for p in turn.history[0].parts if isinstance(p, AudioPart)]
        for turn in orchestrator.turns
        if turn.transcribes
    ]


async def test_words_are_sent_while_the_user_speaks_and_only_the_others_after_it():
    said = (written("Hello there."), spoken("Yes."), written("It rains."))
    async with speaking(*said) as (client, orchestrator):
        client.append(LONG)
        first = await client.expect(KIND + "delta")
        client.append(tone(800) + SILENCE_1S)
        events = await client.until(KIND + "completed")
    [committed] = [event for event in events if event["type"] == COMMITTED]
    assert first["item_id"] == committed["item_id"] == events[-1]["item_id"]
    assert (first["delta"], first["content_index"]) == ("Hello there.", 0)
    assert [event["delta"] for event in of_kind(events, "delta")] == [" It rains."]
    assert events[-1]["transcript"] == "Hello there. It rains."
    assert events[-1]["usage"]["seconds"] == pytest.approx(5.4, abs=0.3)
    assert seconds_transcribed(orchestrator) == [
        [pytest.approx(4.2, abs=0.1)],
        [pytest.approx(1.1, abs=0.2)],
    ]


async def test_a_transcript_that_was_sent_is_complete_with_the_turn():
    gate = asyncio.Event()
    async with speaking(written("Hello."), [gate, *spoken("Yes.")]) as (client, orchestrator):
        client.append(LONG)
        await client.expect(KIND + "delta")
        client.append(SILENCE_1S)
        events = await client.until(KIND + "completed")
        assert events[-1]["transcript"] == "Hello." and COMMITTED in types(events)
        gate.set()  # the response has not made any sound before
        await client.until("response.done")
    assert len(orchestrator.turns) == 2


async def test_words_that_a_longer_clip_may_change_are_not_sent_before():
    async with speaking(spoken("Yes."), written("Hello there.")) as (client, orchestrator):
        client.append(tone(1000) + PAUSE + tone(1000) + SILENCE_1S)
        events = await client.until(KIND + "completed")
    kinds = types(events)
    assert kinds.index(COMMITTED) < kinds.index(KIND + "delta")
    assert seconds_transcribed(orchestrator) == [[pytest.approx(3.1, abs=0.2)]]


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("input_audio_buffer.clear", {}),
        (
            "session.update",
            {"session": {"type": "realtime", "audio": {"input": {"turn_detection": None}}}},
        ),
    ],
)
async def test_a_discarded_turn_has_no_further_words(event, fields):
    gate, later = asyncio.Event(), written("Other words.")
    scripts = (written("Hello."), [gate, *written("there.")], later, later)
    async with speaking(*scripts) as (client, _):
        client.append(LONG)
        first = await client.expect(KIND + "delta")
        client.append(LONG)
        await client.settle()
        client.send(event, **fields)
        gate.set()
        assert not [e for e in await client.settle() if e["type"].startswith(KIND)]
        if event == "session.update":
            return
        # The next turn has an item and words of its own.
        client.append(LONG)
        events = await client.until(KIND + "delta")
        assert events[-1]["item_id"] != first["item_id"]
        assert events[-1]["delta"] == "Other words."


async def test_a_commit_by_the_client_transcribes_the_rest():
    async with speaking(written("Hello."), written("There.")) as (client, orchestrator):
        client.append(LONG)
        first = await client.expect(KIND + "delta")
        client.append(tone(800))
        client.send("input_audio_buffer.commit")
        events = await client.until(KIND + "completed")
    assert events[-1]["item_id"] == first["item_id"]
    assert events[-1]["transcript"] == "Hello. There."
    assert seconds_transcribed(orchestrator)[1] == [pytest.approx(0.9, abs=0.1)]


async def test_a_commit_in_a_pause_completes_what_was_sent():
    async with speaking(written("Hello.")) as (client, orchestrator):
        client.append(LONG)
        await client.expect(KIND + "delta")
        client.send("input_audio_buffer.commit")
        events = await client.until(KIND + "completed")
    assert events[-1]["transcript"] == "Hello." and not of_kind(events, "delta")
    assert len(orchestrator.turns) == 1, "no words are invented for the silence"


async def test_words_that_failed_are_tried_again_when_the_turn_ends():
    failing = [StageFailedError("the recogniser failed")]
    said = (failing, spoken("Yes."), written("Hello there. It rains."))
    async with speaking(*said) as (client, orchestrator):
        client.append(LONG)
        await client.settle()
        client.append(tone(3500) + SILENCE_1S)
        events = await client.until(KIND + "completed")
    assert not of_kind(events, "failed")
    assert events[-1]["transcript"] == "Hello there. It rains."
    # Words that follow are not sent before those that failed.
    assert [len(clips) for clips in seconds_transcribed(orchestrator)] == [1, 2]


async def test_a_transcript_fails_after_the_words_that_were_sent():
    failing = [StageFailedError("the recogniser failed")]
    async with speaking(written("Hello."), spoken("Yes."), failing) as (client, _):
        client.append(LONG)
        await client.expect(KIND + "delta")
        client.append(tone(800) + SILENCE_1S)
        failed = await client.find(KIND + "failed")
    assert failed["error"]["code"] == "stage_failed"


async def test_words_without_an_end_if_the_client_wants_no_more():
    async with speaking(written("Hello."), spoken("Yes.")) as (client, _):
        client.append(LONG)
        await client.expect(KIND + "delta")
        client.update(audio={"input": {"transcription": None}})
        client.append(tone(800) + SILENCE_1S)
        events = await client.until("response.done")
    assert not [event for event in events if event["type"].startswith(KIND)]


async def test_what_may_be_noise_is_examined_before_it_is_transcribed():
    detection = {"type": "server_vad", "threshold": 0.2}
    said = (spoken("Yes."), written("Hello."))
    async with speaking(*said, detection=detection) as (client, orchestrator):
        client.append(LONG)
        await client.settle()
        client.append(tone(800) + SILENCE_1S)
        events = await client.until(KIND + "completed")
    kinds = types(events)
    assert kinds.index(COMMITTED) < kinds.index(KIND + "delta")
    assert len(orchestrator.turns) == 2


async def test_a_transcript_counts_as_one_response():
    said = (written("Hello."), spoken("Yes."), written("There."))
    async with speaking(*said, max_responses_per_minute=2) as (client, _):
        client.append(LONG)
        await client.expect(KIND + "delta")
        client.append(tone(800) + SILENCE_1S)
        assert (await client.find(KIND + "completed"))["transcript"] == "Hello. There."
