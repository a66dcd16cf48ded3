"""semantic_vad: a model judges whether a pause is the end of the turn."""

import asyncio
import threading

import numpy as np
import pytest

from sglang_live.gateway.realtime.services import RealtimeServices
from test.unit.gateway.fakes import FakeOrchestrator, connected, services, tone, types

PAUSE = bytes(24 * 2 * 300)  # 300 ms
SILENCE_1S = bytes(48_000)


class FakeEndpoint:
    """Returns or raises scripted scores, records the audio, waits while `may_judge` is cleared."""

    def __init__(self, *scores: float | Exception):
        self.scores = list(scores)
        self.heard: list[np.ndarray] = []
        self.may_judge = threading.Event()
        self.may_judge.set()
        self.called = threading.Event()

    def completeness(self, pcm: np.ndarray) -> float:
        self.heard.append(pcm)
        self.called.set()
        assert self.may_judge.wait(5)
        score = self.scores.pop(0)
        if isinstance(score, Exception):
            raise score
        return score


def listening(endpoint: FakeEndpoint | None) -> RealtimeServices:
    base = services(FakeOrchestrator())
    return RealtimeServices(
        orchestrator=base.orchestrator,
        config=base.config,
        speech_model=base.speech_model,
        endpoint_model=endpoint,
        clock=base.clock,
        metrics=base.metrics,
    )


def verdicts(shared: RealtimeServices, verdict: str) -> float:
    name = "sglang_live_gateway_endpoint_verdicts_total"
    return shared.metrics.registry.get_sample_value(name, {"verdict": verdict}) or 0


async def semantic(client, eagerness: str = "auto") -> None:
    client.turn_detection({"type": "semantic_vad", "eagerness": eagerness})
    await client.expect("session.updated")


async def test_a_turn_that_sounds_complete_ends_in_its_pause():
    endpoint = FakeEndpoint(0.9)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        events = await client.until("response.done")
        stopped = next(e for e in events if e["type"] == "input_audio_buffer.speech_stopped")
        assert 800 <= stopped["audio_end_ms"] <= 900
        [heard] = endpoint.heard
        assert len(heard) / 16 == pytest.approx(832, abs=40), "all of the turn, with its pause"
        assert verdicts(shared, "complete") == 1
        value = shared.metrics.registry.get_sample_value
        assert value("sglang_live_gateway_turn_ends_total", {"reason": "verdict"}) == 1


async def test_an_incomplete_turn_does_not_end_in_its_pause():
    endpoint = FakeEndpoint(0.1, 0.8)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        await asyncio.to_thread(endpoint.called.wait, 5)
        assert "input_audio_buffer.speech_stopped" not in types(await client.settle())
        client.append(tone(400) + PAUSE)
        events = await client.until("response.done")
        assert types(events).count("input_audio_buffer.committed") == 1
        [turn] = shared.orchestrator.turns
        [part] = turn.history[0].parts
        assert part.duration_s == pytest.approx(1.5, abs=0.1)
        assert [len(pcm) for pcm in endpoint.heard] == sorted(len(pcm) for pcm in endpoint.heard)


@pytest.mark.parametrize(("eagerness", "most_s"), [("low", 8), ("auto", 4), ("high", 2)])
async def test_silence_ends_every_turn_in_the_end(eagerness, most_s):
    shared = listening(FakeEndpoint(0.0))
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, eagerness)
        client.append(tone(600) + SILENCE_1S * (most_s + 1))
        stopped = await client.find("input_audio_buffer.speech_stopped")
        assert stopped["audio_end_ms"] == pytest.approx(600 + 1000 * most_s, abs=64)


@pytest.mark.parametrize(("eagerness", "ends"), [("low", False), ("medium", True), ("high", True)])
async def test_eagerness_is_how_complete_it_must_sound(eagerness, ends):
    shared = listening(FakeEndpoint(0.6))
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, eagerness)
        client.append(tone(600) + PAUSE)
        async with asyncio.timeout(5):
            while not (verdicts(shared, "complete") or verdicts(shared, "pause")):
                await asyncio.sleep(0)
        stopped = "input_audio_buffer.speech_stopped" in types(await client.settle())
        assert stopped == ends


async def test_a_verdict_that_comes_too_late_ends_nothing():
    endpoint = FakeEndpoint(0.9, 0.9)
    endpoint.may_judge.clear()
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        await asyncio.to_thread(endpoint.called.wait, 5)
        client.append(tone(400))
        await client.settle()
        endpoint.may_judge.set()
        while not verdicts(shared, "complete"):
            await asyncio.sleep(0)
        assert "input_audio_buffer.speech_stopped" not in types(await client.settle())
        client.append(PAUSE)
        events = await client.until("response.done")
        assert types(events).count("input_audio_buffer.speech_stopped") == 1


async def test_a_pause_in_which_the_user_speaks_on_is_not_judged():
    endpoint = FakeEndpoint(0.9, 0.9)
    endpoint.may_judge.clear()
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        await asyncio.to_thread(endpoint.called.wait, 5)
        # The model is busy with this pause, so the next one waits, and is over before its turn.
        client.append(tone(300) + PAUSE + tone(300))
        await client.settle()
        endpoint.may_judge.set()
        while not verdicts(shared, "overtaken"):
            await asyncio.sleep(0)
        assert len(endpoint.heard) == 1


async def test_if_the_model_fails_silence_ends_the_turn():
    shared = listening(FakeEndpoint(ValueError("broken")))
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, "high")
        client.append(tone(600) + SILENCE_1S * 3)
        await client.until("response.done")
        assert verdicts(shared, "failed") == 1


async def test_without_a_model_silence_ends_the_turn():
    shared = listening(None)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, "high")
        client.append(tone(600) + SILENCE_1S)
        stopped = await client.find("input_audio_buffer.speech_stopped")
        assert stopped["audio_end_ms"] == pytest.approx(1000, abs=64)


async def test_server_vad_uses_no_model():
    endpoint = FakeEndpoint()
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        client.append(tone(600) + SILENCE_1S)
        await client.until("response.done")
        assert endpoint.heard == []


async def test_a_verdict_after_the_end_of_the_session_starts_nothing():
    """The client disconnects right after the user's last words."""
    endpoint = FakeEndpoint(0.9)
    endpoint.may_judge.clear()
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        await asyncio.to_thread(endpoint.called.wait, 5)
        client.send_raw(None)
        await asyncio.wait_for(shared.orchestrator.session.closed.wait(), 5)
        endpoint.may_judge.set()
        while not verdicts(shared, "complete"):
            await asyncio.sleep(0)
    assert shared.orchestrator.turns == []


async def test_of_a_long_turn_the_model_gets_the_last_eight_seconds():
    endpoint = FakeEndpoint(0.9)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(12_000) + PAUSE)
        await client.until("response.done")
        [heard] = endpoint.heard
        assert len(heard) == 8 * 16_000
        [turn] = shared.orchestrator.turns
        assert turn.history[0].parts[0].duration_s > 12
