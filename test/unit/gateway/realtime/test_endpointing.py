"""semantic_vad: a model judges whether a pause is the end of the turn."""

import asyncio
import threading

import numpy as np
import pytest

from benchmark.turn_taking.components import (
    VERDICT_MS,
    Hearing,
    RememberedScores,
    hear_ends,
    semantic_rules,
)
from sglang_live.gateway.realtime.services import RealtimeServices
from sglang_live.gateway.realtime.turns.endpointing import Endpointing
from sglang_live.interaction.turn_end import cutoff_ms, judged, silence_ms
from test.unit.gateway.fakes import (
    FakeOrchestrator,
    LoudnessModel,
    connected,
    services,
    tone,
    types,
)

PAUSE = bytes(24 * 2 * 300)  # 300 ms
SILENCE_1S = bytes(48_000)
SURE, VAGUE, UNLIKELY = 0.9999, 0.5, 0.0


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


def listening(endpoint: FakeEndpoint | None, threads: int = 1) -> RealtimeServices:
    base = services(FakeOrchestrator())
    shared = RealtimeServices(
        orchestrator=base.orchestrator,
        config=base.config,
        speech_model=base.speech_model,
        endpoint_model=endpoint,
        clock=base.clock,
        metrics=base.metrics,
    )
    if endpoint is not None:
        shared.endpointing = Endpointing(endpoint, base.clock, base.metrics, threads)
    return shared


def verdicts(shared: RealtimeServices, verdict: str) -> float:
    name = "sglang_live_gateway_endpoint_verdicts_total"
    return shared.metrics.registry.get_sample_value(name, {"verdict": verdict}) or 0


async def semantic(client, eagerness: str = "auto") -> None:
    client.turn_detection({"type": "semantic_vad", "eagerness": eagerness})
    await client.expect("session.updated")


def ends(shared: RealtimeServices, reason: str) -> float:
    name = "sglang_live_gateway_turn_ends_total"
    return shared.metrics.registry.get_sample_value(name, {"reason": reason}) or 0


async def decided(shared: RealtimeServices, *kinds: str, n: int = 1) -> None:
    """Wait for n verdicts of these kinds."""
    async with asyncio.timeout(5):
        while sum(verdicts(shared, kind) for kind in kinds) < n:
            await asyncio.sleep(0)


def waited_ms(eagerness: str, score: float) -> int:
    return judged(score, cutoff_ms(eagerness)).wait_ms


@pytest.mark.parametrize("eagerness", ["low", "medium", "high"])
@pytest.mark.parametrize("score", [SURE, VAGUE, UNLIKELY])
async def test_a_turn_ends_after_the_silence_that_its_score_calls_for(eagerness, score):
    endpoint = FakeEndpoint(score)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, eagerness)
        client.append(tone(600) + PAUSE)
        await decided(shared, "pause", "complete")
        client.append(SILENCE_1S * 3)
        stopped = await client.find("input_audio_buffer.speech_stopped")
        silent_ms = stopped["audio_end_ms"] - 600
        assert silent_ms == pytest.approx(max(300, waited_ms(eagerness, score)), abs=64)
        [heard] = endpoint.heard
        assert len(heard) / 16 == pytest.approx(832, abs=40), "all of the turn, with its pause"
        assert ends(shared, "verdict") == 1


async def test_a_turn_ends_at_once_if_its_silence_has_lasted():
    endpoint = FakeEndpoint(SURE)
    endpoint.may_judge.clear()
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, "low")
        client.append(tone(600) + bytes(48 * (waited_ms("low", SURE) + 40)))
        await client.settle()
        endpoint.may_judge.set()
        await client.until("response.done")
        assert verdicts(shared, "complete") == ends(shared, "verdict") == 1


async def test_an_incomplete_turn_does_not_end_in_its_pause():
    endpoint = FakeEndpoint(UNLIKELY, SURE)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE * 3)
        await decided(shared, "pause", "complete")
        assert "input_audio_buffer.speech_stopped" not in types(await client.settle())
        client.append(tone(400) + PAUSE)
        await decided(shared, "pause", "complete", n=2)
        client.append(SILENCE_1S * 2)
        events = await client.until("response.done")
        assert types(events).count("input_audio_buffer.committed") == 1
        assert [len(pcm) for pcm in endpoint.heard] == sorted(len(pcm) for pcm in endpoint.heard)


async def test_a_verdict_that_comes_too_late_ends_nothing():
    endpoint = FakeEndpoint(SURE, SURE)
    endpoint.may_judge.clear()
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        await asyncio.to_thread(endpoint.called.wait, 5)
        client.append(tone(400))
        await client.settle()
        endpoint.may_judge.set()
        await decided(shared, "overtaken")
        assert "input_audio_buffer.speech_stopped" not in types(await client.settle())
        client.append(PAUSE)
        await decided(shared, "pause", "complete")
        client.append(SILENCE_1S)
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
        await decided(shared, "overtaken", n=2)
        assert len(endpoint.heard) == 1


async def test_pauses_of_two_users_are_judged_at_once():
    endpoint = FakeEndpoint(0.9, 0.9)
    endpoint.may_judge.clear()
    shared = listening(endpoint, threads=2)
    async with (
        connected(shared.orchestrator, shared) as first,
        connected(shared.orchestrator, shared) as second,
    ):
        for client in (first, second):
            await semantic(client)
            client.append(tone(600) + PAUSE)
        async with asyncio.timeout(5):
            while len(endpoint.heard) < 2:  # neither verdict is known yet
                await asyncio.sleep(0.01)
        endpoint.may_judge.set()
        await decided(shared, "pause", "complete", n=2)


async def test_if_the_model_fails_silence_ends_the_turn():
    shared = listening(FakeEndpoint(ValueError("broken")))
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, "high")
        client.append(tone(600) + PAUSE)
        await decided(shared, "failed")
        client.append(SILENCE_1S)
        stopped = await client.find("input_audio_buffer.speech_stopped")
        silent_ms = stopped["audio_end_ms"] - 600
        assert silent_ms == pytest.approx(silence_ms(cutoff_ms("high")), abs=40)
        assert ends(shared, "silence") == 1


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
    endpoint = FakeEndpoint(SURE)
    endpoint.may_judge.clear()
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        await asyncio.to_thread(endpoint.called.wait, 5)
        client.send_raw(None)
        await asyncio.wait_for(shared.orchestrator.session.closed.wait(), 5)
        endpoint.may_judge.set()
        await decided(shared, "overtaken")
    assert shared.orchestrator.turns == []


async def test_of_a_long_turn_the_model_gets_the_last_eight_seconds():
    endpoint = FakeEndpoint(SURE)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(12_000) + PAUSE)
        await decided(shared, "pause", "complete")
        client.append(SILENCE_1S * 2)
        await client.until("response.done")
        [heard] = endpoint.heard
        assert len(heard) == 8 * 16_000
        [turn] = shared.orchestrator.turns
        assert turn.history[0].parts[0].duration_s > 12


PACKET_MS = 20
# Voice and silence in ms: a pause that goes on, one that ends the turn, a turn with two pauses.
DIALOGUE = [(1024, 512), (640, 2048), (320, 320), (480, 448), (640, 2560)]


@pytest.mark.parametrize("eagerness", ["low", "medium", "high"])
async def test_the_gateway_decides_as_the_offline_component(eagerness):
    sound = b"".join(tone(voiced) + bytes(48 * silent) for voiced, silent in DIALOGUE)
    pcm = np.frombuffer(sound, "<i2")
    heard = np.zeros(len(pcm) * 2 // 3, np.int16)
    heard[:] = np.interp(np.arange(len(heard)) * 1.5, np.arange(len(pcm)), pcm)

    class ScoresByLength:
        """Scores that differ from pause to pause, and are the same for both."""

        def completeness(self, audio: np.ndarray) -> float:
            return (0.0, 0.5, 0.9999)[round(len(audio) / 5000) % 3]

    own = Hearing(heard, RememberedScores(LoudnessModel()), ScoresByLength())
    [rule] = [rule for rule in semantic_rules() if rule.setting == eagerness]
    offline_ms = [decision.at_ms for decision in hear_ends(own, rule)]
    shared = listening(ScoresByLength())
    ended_ms = []
    async with connected(shared.orchestrator, shared) as client:
        setting = {"type": "semantic_vad", "eagerness": eagerness, "create_response": False}
        client.turn_detection(setting)
        await client.expect("session.updated")
        size = 48 * PACKET_MS
        for at in range(0, len(sound) - size + 1, size):
            client.append(sound[at : at + size])
            events = await client.settle()
            async with asyncio.timeout(5):
                while shared.endpointing.judging:
                    await asyncio.sleep(0)
            events += await client.settle()
            if "input_audio_buffer.speech_stopped" in types(events):
                ended_ms.append((at + size) / 48)
    assert len(offline_ms) >= 2
    # Offline a verdict takes 50 ms, here it is known with the packet.
    assert ended_ms == pytest.approx(offline_ms, abs=VERDICT_MS + PACKET_MS)
