"""A microphone that stays open: silence before a turn is dropped, and counts against no limit."""

import numpy as np
import pytest

from sglang_live.clock import SimClock
from test.unit.gateway.fakes import Client, FakeOrchestrator, connected, services, spoken, tone

SILENCE_1S = bytes(48_000)
# Too soft for detection, but speech in a recording that a client commits.
SOFT_1S = (np.frombuffer(tone(1000), "<i2") // 6).astype("<i2").tobytes()
LIMIT_S = 12


def listen(
    client: Client, silent_s: int, speech_ms: int = 0, silence_1s: bytes = SILENCE_1S
) -> None:
    for _ in range(silent_s):
        client.append(silence_1s)
    if speech_ms:
        client.append(tone(speech_ms))
        client.append(SILENCE_1S)


async def committed_s(client: Client, orchestrator: FakeOrchestrator) -> float:
    """Duration of all audio of a commit at the client's request."""
    client.send("input_audio_buffer.commit")
    client.send("response.create")
    await client.until("response.done")
    (part,) = orchestrator.turns[-1].history[-1].parts
    return part.duration_s


@pytest.mark.parametrize("silent_s", [LIMIT_S - 1, LIMIT_S, 3 * LIMIT_S])
async def test_a_question_after_any_silence_is_one_turn(silent_s):
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator, max_input_audio_s=LIMIT_S) as client:
        listen(client, silent_s, speech_ms=3000)
        by_type = {event["type"]: event for event in await client.until("response.done")}
        assert await client.settle() == []
    begin_ms = by_type["input_audio_buffer.speech_started"]["audio_start_ms"]
    end_ms = by_type["input_audio_buffer.speech_stopped"]["audio_end_ms"]
    assert begin_ms == pytest.approx(1000 * silent_s - 300, abs=40)
    assert end_ms == pytest.approx(1000 * silent_s + 3500, abs=40)
    assert by_type["response.done"]["response"]["status"] == "completed"
    (turn,) = orchestrator.turns
    (part,) = turn.history[0].parts
    assert part.duration_s * 1000 == pytest.approx(end_ms - begin_ms)


async def test_the_limit_counts_from_the_beginning_of_the_turn():
    async with connected(FakeOrchestrator(), max_input_audio_s=LIMIT_S) as client:
        listen(client, LIMIT_S - 2, speech_ms=1000 * (LIMIT_S + 2))
        events = await client.until("input_audio_buffer.speech_stopped")
        length_ms = events[-1]["audio_end_ms"] - events[0]["audio_start_ms"]
        assert 1000 * LIMIT_S <= length_ms <= 1000 * (LIMIT_S + 1)


async def test_a_silent_microphone_holds_its_last_seconds_however_long_it_is_open():
    orchestrator = FakeOrchestrator()
    shared = services(orchestrator)
    async with connected(orchestrator, shared) as client:
        listen(client, silent_s=40, silence_1s=SOFT_1S)
        assert await client.settle() == []
        assert await committed_s(client, orchestrator) == pytest.approx(10, abs=0.01)
        listen(client, silent_s=20)
        client.send("input_audio_buffer.clear")
        listen(client, silent_s=1, silence_1s=SOFT_1S)
        assert await committed_s(client, orchestrator) == pytest.approx(1, abs=0.01)
        # Dropped and cleared audio still counts as time.
        listen(client, silent_s=0, speech_ms=600)
        started = await client.find("input_audio_buffer.speech_started")
        assert started["audio_start_ms"] == pytest.approx(61_000, abs=40)
        await client.until("response.done")
    name = "sglang_live_gateway_input_audio_dropped_seconds_total"
    assert shared.metrics.registry.get_sample_value(name) == pytest.approx(40, abs=0.1)


async def test_without_detection_nothing_is_dropped():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        listen(client, silent_s=15, silence_1s=SOFT_1S)
        client.turn_detection(None)
        listen(client, silent_s=20, silence_1s=SOFT_1S)
        assert await committed_s(client, orchestrator) == pytest.approx(30, abs=0.1)


async def test_detection_that_is_switched_on_finds_the_turn_in_all_buffered_audio():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        client.turn_detection(None)
        client.append(tone(2000))
        listen(client, silent_s=15)
        client.turn_detection({"silence_duration_ms": 20_000})
        listen(client, silent_s=6)
        await client.expect("session.updated")
        await client.expect("session.updated")
        started = await client.expect("input_audio_buffer.speech_started")
        assert started["audio_start_ms"] == 0
        await client.until("response.done")
        (part,) = orchestrator.turns[0].history[0].parts
        assert part.duration_s == pytest.approx(22, abs=0.1)


async def test_a_longer_padding_announces_the_audio_that_is_still_held():
    orchestrator = FakeOrchestrator()
    async with connected(orchestrator) as client:
        listen(client, silent_s=25)
        client.turn_detection({"prefix_padding_ms": 20_000})
        listen(client, silent_s=1, speech_ms=600)
        by_type = {event["type"]: event for event in await client.until("response.done")}
        begin_ms = by_type["input_audio_buffer.speech_started"]["audio_start_ms"]
        end_ms = by_type["input_audio_buffer.speech_stopped"]["audio_end_ms"]
        (part,) = orchestrator.turns[0].history[0].parts
        assert begin_ms == pytest.approx(15_000, abs=40)
        assert part.duration_s * 1000 == pytest.approx(end_ms - begin_ms)
        listen(client, silent_s=25, speech_ms=600)
        started = await client.find("input_audio_buffer.speech_started")
        assert started["audio_start_ms"] == pytest.approx(32_600, abs=40)
        await client.until("response.done")


async def test_the_idle_timeout_takes_all_of_the_silence_it_reports():
    clock = SimClock()
    orchestrator = FakeOrchestrator([spoken("Hello?", 800), spoken("Are you there?")])
    async with connected(orchestrator, services(orchestrator, clock)) as client:
        client.turn_detection({"idle_timeout_ms": 25_000})
        client.send("response.create")
        await client.until("response.done")
        listen(client, silent_s=40)
        await client.settle()
        clock.advance(26.0)
        triggered = (await client.until("response.done"))[0]
        assert triggered["audio_end_ms"] - triggered["audio_start_ms"] == 25_000
        (part,) = orchestrator.turns[1].history[-1].parts
        assert part.duration_s == 25
