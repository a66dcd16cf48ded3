"""A speculative turn: its events come at once if confirmed; withdrawn, it has no effect."""

import asyncio

import pytest

from sglang_live.core import TranscriptDelta
from sglang_live.errors import StageFailedError
from sglang_live.gateway.call.responses.speculation import SpeculativeTurn
from sglang_live.interaction.endpoint import EndpointThreads
from test.unit.gateway.fakes import (
    FakeOrchestrator,
    FakeSession,
    connected,
    done,
    services,
    spoken,
    tone,
)
from test.unit.gateway.realtime.test_pause_judge import FakeEndpoint, Threads, scored

QUIET = bytes(9_600)  # 200 ms
VAD = {"type": "server_vad", "silence_duration_ms": 500}


def speculating(orchestrator: FakeOrchestrator, **config):
    return services(orchestrator, speculate_ms=150, **config)


async def pause_after_speech(client, ms: int = 600) -> None:
    client.append(tone(ms) + QUIET)


async def settled(orchestrator, n_turns: int) -> None:
    async with asyncio.timeout(30):
        while len(orchestrator.turns) < n_turns:
            await asyncio.sleep(0.01)


def outcomes(shared) -> dict[str, float]:
    samples = shared.metrics.speculative_turns.collect()[0].samples
    return {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total")}


async def test_a_confirmed_speculative_turn_is_the_response():
    orchestrator = FakeOrchestrator([spoken("Yes.")])
    shared = speculating(orchestrator)
    async with connected(orchestrator, shared) as client:
        await pause_after_speech(client)
        await settled(orchestrator, 1)
        assert not [e for e in await client.settle() if e["type"].startswith("response.")]
        client.append(QUIET * 3)
        events = await client.until("response.done")
        [turn] = orchestrator.turns
        assert turn.speculative
        client.say("And?")
        client.send("response.create")
        await client.until("response.done")
    assert events[-1]["response"]["status"] == "completed"
    assert orchestrator.turns[1].history[0].key == turn.history[0].key
    assert outcomes(shared) == {"answered": 1}
    assert orchestrator.session.speculations == [True]


async def test_a_withdrawn_speculative_turn_is_replaced_by_one_over_the_whole_utterance():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, *spoken("Too early.")], spoken("Yes.")])
    shared = speculating(orchestrator)
    async with connected(orchestrator, shared) as client:
        await pause_after_speech(client)
        await settled(orchestrator, 1)
        orchestrator.session.on_interrupt = [done("Too", status="interrupted")]
        client.append(tone(600) + QUIET * 4)
        events = await client.until("response.done")
    first, second = orchestrator.turns[0], orchestrator.turns[-1]
    assert orchestrator.session.n_interrupted == 1
    assert [len(turn.history) for turn in orchestrator.turns] == [1] * len(orchestrator.turns)
    assert first.history[0].key != second.history[0].key
    assert len(second.history[0].parts[0].pcm) > len(first.history[0].parts[0].pcm) + 9_000
    text = [e["transcript"] for e in events if e["type"].endswith("audio_transcript.done")]
    assert text == ["Yes."]
    assert outcomes(shared)["withdrawn"] >= 1
    assert orchestrator.session.speculations[0] is False


@pytest.mark.parametrize("event", ["input_audio_buffer.clear", "input_audio_buffer.commit"])
async def test_a_commit_by_the_client_withdraws_the_speculative_turn(event):
    orchestrator = FakeOrchestrator([spoken("Yes.")])
    shared = speculating(orchestrator)
    async with connected(orchestrator, shared) as client:
        await pause_after_speech(client)
        await settled(orchestrator, 1)
        client.send(event)
        await client.settle()
    assert len(orchestrator.turns) == 1
    assert outcomes(shared) == {"withdrawn": 1}


async def test_a_change_of_settings_withdraws_the_speculative_turn():
    orchestrator = FakeOrchestrator([spoken("Yes."), spoken("Oui.")])
    shared = speculating(orchestrator)
    async with connected(orchestrator, shared) as client:
        await pause_after_speech(client)
        await settled(orchestrator, 1)
        client.update(instructions="Speak French.")
        client.append(QUIET * 3)
        await client.until("response.done")
    assert orchestrator.turns[-1].instructions == "Speak French."
    assert outcomes(shared) == {"withdrawn": 1}


async def test_a_speculative_turn_that_failed_in_the_pause_is_replaced():
    orchestrator = FakeOrchestrator([[StageFailedError("gone")], spoken("Yes.")])
    shared = speculating(orchestrator)
    async with connected(orchestrator, shared) as client:
        await pause_after_speech(client)
        await client.settle()
        client.append(QUIET * 3)
        end = await client.find("response.done")
    assert end["response"]["status"] == "completed"
    assert [turn.speculative for turn in orchestrator.turns] == [True, False]
    assert outcomes(shared) == {"withdrawn": 1}
    assert orchestrator.session.speculations == [False]


async def test_a_confirmed_speculative_turn_that_fails_fails_the_response():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, StageFailedError("gone")]])
    async with connected(orchestrator, speculating(orchestrator)) as client:
        await pause_after_speech(client)
        client.append(QUIET * 3)
        await client.until("response.created")
        gate.set()
        end = await client.find("response.done")
    assert end["response"]["status"] == "failed"
    assert end["response"]["status_details"]["error"]["code"] == "stage_failed"


async def test_a_confirmed_speculative_turn_that_crashes_fails_the_response():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, KeyError("a bug")]])
    async with connected(orchestrator, speculating(orchestrator)) as client:
        await pause_after_speech(client)
        client.append(QUIET * 3)
        await client.until("response.created")
        gate.set()
        end = await client.find("response.done")
    assert end["response"]["status"] == "failed"
    assert end["response"]["status_details"]["error"]["code"] == "internal_error"


async def test_a_session_that_ends_in_a_speculative_turn_leaves_nothing_behind():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, *spoken("Never.")]])
    async with connected(orchestrator, speculating(orchestrator)) as client:
        await pause_after_speech(client)
        await settled(orchestrator, 1)
    assert orchestrator.session.n_cancelled == 1


def refusals(shared) -> dict[str, float]:
    samples = shared.metrics.speculations_refused.collect()[0].samples
    return {s.labels["reason"]: s.value for s in samples if s.name.endswith("_total")}


async def test_without_room_no_speculative_turn_begins_and_the_reason_is_counted():
    orchestrator = FakeOrchestrator([spoken("Yes.")])
    shared = speculating(orchestrator)
    async with connected(orchestrator, shared) as client:
        orchestrator.session.speculation_refusal = "busy"
        await pause_after_speech(client)
        await client.settle()
        assert orchestrator.turns == []
        client.append(QUIET * 3)
        await client.until("response.done")
        [turn] = orchestrator.turns
    assert not turn.speculative
    assert outcomes(shared) == {} and refusals(shared) == {"busy": 1}


async def test_beside_a_running_response_no_speculative_turn_begins():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, *spoken("Yes.")], spoken("And yes.")])
    shared = speculating(orchestrator)
    async with connected(orchestrator, shared) as client:
        client.turn_detection({**VAD, "interrupt_response": False})
        await client.expect("session.updated")
        client.send("response.create")
        await client.until("response.created")
        await pause_after_speech(client)
        await client.settle()
        assert len(orchestrator.turns) == 1 and refusals(shared) == {"turn_runs": 1}
        gate.set()
        await client.until("response.done")


@pytest.mark.parametrize("prefill", [{}, {"turn_prefill_s": 1.0}, {"prefills_at_pauses": True}])
async def test_the_model_hears_the_same_with_and_without_a_speculative_turn(prefill):
    heard, told = [], []
    for refusal in ("", "busy"):
        orchestrator = FakeOrchestrator([spoken("Yes.")] * 2)
        shared = speculating(orchestrator, **prefill)
        async with connected(orchestrator, shared) as client:
            orchestrator.session.speculation_refusal = refusal
            speech = tone(2600) + QUIET * 4
            for at in range(0, len(speech), len(QUIET) // 10):
                client.append(speech[at : at + len(QUIET) // 10])
            events = await client.until("response.done")
            [turn] = orchestrator.turns
        assert turn.speculative == (not refusal)
        told.append([event["type"] for event in events])
        heard.append([part.pcm.tobytes() for item in turn.history for part in item.parts])
    assert heard[0] == heard[1]
    assert told[0] == told[1]


async def test_a_change_of_mind_after_a_pause_leaves_the_whole_utterance():
    orchestrator = FakeOrchestrator([spoken("Yes.")])
    shared = speculating(orchestrator)
    async with connected(orchestrator, shared) as client:
        orchestrator.session.speculation_refusal = "busy"
        await pause_after_speech(client)
        client.append(tone(600))
        client.send("input_audio_buffer.commit")
        client.send("response.create")
        await client.until("response.done")
        [turn] = orchestrator.turns
    [part] = turn.history[0].parts
    assert part.duration_s == pytest.approx(1.4, abs=0.05)


async def test_semantic_vad_withdraws_when_the_turn_does_not_sound_complete():
    threads = Threads()
    threads.hold()
    orchestrator = FakeOrchestrator([spoken("Too early."), spoken("Yes.")])
    shared = speculating(orchestrator)
    shared.endpoint = EndpointThreads(FakeEndpoint(0.0, 0.9), threads)
    async with connected(orchestrator, shared) as client:
        client.turn_detection({"type": "semantic_vad"})
        await client.expect("session.updated")
        client.append(tone(600) + QUIET * 2)
        await settled(orchestrator, 1)
        assert not [e for e in await client.settle() if e["type"].startswith("response.")]
        threads.release()
        await scored(client)
        assert outcomes(shared) == {"withdrawn": 1}
        client.append(tone(600) + QUIET * 2)
        await client.until("response.done")
    assert outcomes(shared) == {"withdrawn": 1, "answered": 1}
    early, turn = orchestrator.turns
    assert len(turn.history[0].parts[0].pcm) > len(early.history[0].parts[0].pcm)


async def test_without_create_response_there_is_no_speculative_turn():
    orchestrator = FakeOrchestrator([spoken("Yes.")])
    async with connected(orchestrator, speculating(orchestrator)) as client:
        client.turn_detection({**VAD, "create_response": False})
        await client.expect("session.updated")
        await pause_after_speech(client)
        await client.settle()
        assert orchestrator.turns == []


class CountingSession(FakeSession):
    """Counts the events that are taken from it."""

    n_taken = 0

    async def respond(self, turn):
        async for event in super().respond(turn):
            self.n_taken += 1
            yield event


@pytest.mark.parametrize("confirms", [True, False])
async def test_a_turn_that_is_not_confirmed_makes_some_sentences_and_waits(confirms):
    words = [TranscriptDelta(f"{n} ", n) for n in range(1000)]
    session = CountingSession("s", [[*words, done()]])
    turn = SpeculativeTurn(session, object(), ())  # the fake session reads nothing of the request
    turn._request = type("Request", (), {"stateless": False, "begun": None})()
    async with asyncio.timeout(30):
        while session.n_taken < 129:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert session.n_taken == 129
        if confirms:
            events = [event async for event in turn.confirm()]
            assert events[:-1] == words
        else:
            session.on_interrupt = words
            turn.withdraw()
            await turn.task
    assert session.n_taken > 1000 and session.n_cancelled == 0
