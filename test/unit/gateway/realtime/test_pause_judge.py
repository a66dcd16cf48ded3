"""semantic_vad: a model judges whether a pause is the end of the turn."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

import numpy as np
import pytest

from benchmark.turn_taking.components import (
    VERDICT_MS,
    Hearing,
    RememberedScores,
    hear_ends,
    semantic_rules,
)
from sglang_live.core import AudioPart
from sglang_live.errors import StageFailedError
from sglang_live.gateway.parts import GatewayParts
from sglang_live.interaction.endpoint import EndpointThreads
from sglang_live.interaction.turn_end import (
    SCORED_AT_MS,
    cutoff_ms,
    judged,
    silence_ms,
    word_evidence,
)
from test.unit.gateway.fakes import (
    FakeOrchestrator,
    LoudnessModel,
    connected,
    services,
    spoken,
    tone,
    types,
)
from test.unit.gateway.realtime.test_input_transcription import written

PAUSE = bytes(24 * 2 * 300)  # 300 ms
SILENCE_1S = bytes(48_000)
SURE, VAGUE, UNLIKELY = 0.9999, 0.5, 0.0


class FakeEndpoint:
    """Returns or raises scripted scores, the last one again and again. It records the audio."""

    def __init__(self, *scores: float | Exception):
        self.scores = list(scores)
        self.heard: list[np.ndarray] = []

    def completeness(self, pcm: np.ndarray) -> float:
        self.heard.append(pcm)
        score = self.scores.pop(0) if len(self.scores) > 1 else self.scores[0]
        if isinstance(score, Exception):
            raise score
        return score


class Threads(Executor):
    """n threads whose work takes no time, or lasts from hold() to release(). There are none: all
    of it is done in the test's own."""

    def __init__(self, n: int = 1):
        self._n = n
        self._held = False
        self._waiting: deque[tuple[Callable[[], object], Future]] = deque()
        self._running: list[tuple[Future, object]] = []

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        self._go_on()

    def submit(self, work, /, *args):
        future: Future = Future()
        self._waiting.append((work, future))
        self._go_on()
        return future

    def _go_on(self) -> None:
        while True:
            while self._running and not self._held:
                future, outcome = self._running.pop(0)
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
            if not self._waiting or len(self._running) == self._n:
                return
            work, future = self._waiting.popleft()
            try:
                self._running.append((future, work()))
            except ValueError as error:
                self._running.append((future, error))


def listening(
    endpoint: FakeEndpoint | None,
    threads: Threads | None = None,
    scripts: Sequence[list] = (),
    **config: object,
) -> GatewayParts:
    base = services(FakeOrchestrator(list(scripts)), **config)
    shared = GatewayParts(
        orchestrator=base.orchestrator,
        config=base.config,
        speech_model=base.speech_model,
        endpoint_model=endpoint,
        clock=base.clock,
        metrics=base.metrics,
    )
    if endpoint is not None:
        shared.endpoint = EndpointThreads(endpoint, threads or Threads())
    shared.scorer = base.scorer
    return shared


def verdicts(shared: GatewayParts, verdict: str) -> float:
    name = "sglang_live_gateway_endpoint_verdicts_total"
    return shared.metrics.registry.get_sample_value(name, {"verdict": verdict}) or 0


async def semantic(client, eagerness: str = "auto") -> None:
    client.turn_detection({"type": "semantic_vad", "eagerness": eagerness})
    await client.expect("session.updated")


def ends(shared: GatewayParts, reason: str) -> float:
    name = "sglang_live_gateway_turn_ends_total"
    return shared.metrics.registry.get_sample_value(name, {"reason": reason}) or 0


async def scored(client) -> list[dict]:
    """All events, when each score that was asked for is there."""
    events = await client.settle()
    while any(task.get_name() == "endpoint" for task in asyncio.all_tasks()):
        await asyncio.sleep(0)
    return events + await client.settle()


def n_decided(shared: GatewayParts) -> float:
    return verdicts(shared, "pause") + verdicts(shared, "complete")


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
        events = await scored(client)
        assert n_decided(shared) == 1
        client.append(SILENCE_1S * 3)
        events += await client.settle()
        silent_ms = ended_after_ms(events)
        assert silent_ms == pytest.approx(max(300, waited_ms(eagerness, score)), abs=64)
        heard = endpoint.heard[0]
        assert len(heard) / 16 == pytest.approx(832, abs=40), "all of the turn, with its pause"
        assert ends(shared, "verdict") == 1


async def test_a_turn_ends_at_once_if_its_silence_has_lasted():
    endpoint, threads = FakeEndpoint(SURE), Threads()
    threads.hold()
    shared = listening(endpoint, threads)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, "low")
        client.append(tone(600) + bytes(48 * (waited_ms("low", SURE) + 40)))
        await client.settle()
        threads.release()
        await client.until("response.done")
        assert verdicts(shared, "complete") == ends(shared, "verdict") == 1


async def test_an_incomplete_turn_does_not_end_in_its_pause():
    endpoint = FakeEndpoint(UNLIKELY, SURE)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600))
        assert "input_audio_buffer.speech_stopped" not in types(await silent_for(client, 900))
        n_before = n_decided(shared)
        client.append(tone(400) + PAUSE)
        events = await scored(client)
        assert n_decided(shared) > n_before >= 1
        client.append(SILENCE_1S * 2)
        events += await client.settle()
        assert types(events).count("input_audio_buffer.committed") == 1
        assert [len(pcm) for pcm in endpoint.heard] == sorted(len(pcm) for pcm in endpoint.heard)


async def test_a_verdict_that_comes_too_late_ends_nothing():
    endpoint, threads = FakeEndpoint(SURE, SURE), Threads()
    threads.hold()
    shared = listening(endpoint, threads)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        await client.settle()
        assert len(endpoint.heard) == 1
        client.append(tone(400))
        await client.settle()
        threads.release()
        assert "input_audio_buffer.speech_stopped" not in types(await scored(client))
        assert verdicts(shared, "overtaken") == 1
        client.append(PAUSE)
        events = await scored(client)
        assert n_decided(shared) == 1
        client.append(SILENCE_1S)
        events += await client.settle()
        assert types(events).count("input_audio_buffer.speech_stopped") == 1


async def test_a_pause_in_which_the_user_speaks_on_is_not_judged():
    endpoint, threads = FakeEndpoint(0.9, 0.9), Threads()
    threads.hold()
    shared = listening(endpoint, threads)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        await client.settle()
        # The model is busy with this pause, so the next one waits, and is over before its turn.
        client.append(tone(300) + PAUSE + tone(300))
        await client.settle()
        threads.release()
        await scored(client)
        assert verdicts(shared, "overtaken") == 2
        assert len(endpoint.heard) == 1


async def test_pauses_of_two_users_are_judged_at_once():
    endpoint, threads = FakeEndpoint(0.9, 0.9), Threads(2)
    threads.hold()
    shared = listening(endpoint, threads)
    async with (
        connected(shared.orchestrator, shared) as first,
        connected(shared.orchestrator, shared) as second,
    ):
        for client in (first, second):
            await semantic(client)
            client.append(tone(600) + PAUSE)
            await client.settle()
        assert len(endpoint.heard) == 2 and n_decided(shared) == 0
        threads.release()
        await scored(first)
        assert n_decided(shared) == 2


async def test_if_the_model_fails_silence_ends_the_turn():
    shared = listening(FakeEndpoint(ValueError("broken")))
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, "high")
        client.append(tone(600) + PAUSE)
        await scored(client)
        assert verdicts(shared, "failed") == 1
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
    endpoint, threads = FakeEndpoint(SURE), Threads()
    threads.hold()
    shared = listening(endpoint, threads)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600) + PAUSE)
        await client.settle()
        assert len(endpoint.heard) == 1
        client.send_raw(None)
        await shared.orchestrator.session.closed.wait()
        threads.release()
        while not verdicts(shared, "overtaken"):
            await asyncio.sleep(0)
    assert shared.orchestrator.turns == []


async def test_of_a_long_turn_the_model_gets_the_last_eight_seconds():
    endpoint = FakeEndpoint(SURE)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(12_000) + PAUSE)
        await scored(client)
        client.append(SILENCE_1S * 2)
        await client.settle()
        assert {len(heard) for heard in endpoint.heard} == {8 * 16_000}
        [turn] = shared.orchestrator.turns
        assert turn.history[0].parts[0].duration_s > 12


# --- later scores ---


async def silent_for(client, ms: int) -> list[dict]:
    """Silence in packets; each score is known with the packet that it was asked for with."""
    events = []
    for _ in range(ms // PACKET_MS):
        client.append(bytes(48 * PACKET_MS))
        events += await scored(client)
    return events


def ended_after_ms(events: list[dict], voiced_ms: int = 600) -> int:
    [stopped] = [e for e in events if e["type"] == "input_audio_buffer.speech_stopped"]
    return stopped["audio_end_ms"] - voiced_ms


async def test_a_pause_is_scored_again_while_it_lasts():
    endpoint = FakeEndpoint(VAGUE)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, "low")
        client.append(tone(600))
        await silent_for(client, 1000)
        lengths_ms = [len(pcm) / 16 for pcm in endpoint.heard]
        assert np.diff(lengths_ms) == pytest.approx(np.diff(SCORED_AT_MS[:3]), abs=40)
        client.append(tone(300))
        await client.settle()
        assert len(endpoint.heard) == 3


@pytest.mark.parametrize(("first", "then"), [(UNLIKELY, SURE), (VAGUE, UNLIKELY)])
async def test_the_least_score_of_a_pause_counts(first, then):
    endpoint = FakeEndpoint(first, then)
    shared = listening(endpoint)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, "low")
        client.append(tone(600))
        silent_ms = ended_after_ms(await silent_for(client, 3000))
    assert silent_ms == pytest.approx(waited_ms("low", UNLIKELY), abs=64)


async def test_a_busy_model_is_not_asked_for_overdue_scores():
    endpoint, threads = FakeEndpoint(VAGUE), Threads()
    threads.hold()
    shared = listening(endpoint, threads)
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client, "low")
        client.append(tone(600) + PAUSE)
        await client.settle()
        assert len(endpoint.heard) == 1
        for _ in range(40):
            client.append(bytes(48 * PACKET_MS))
            await client.settle()
        threads.release()
        await scored(client)
        assert verdicts(shared, "pause") == 1
        await silent_for(client, PACKET_MS)
        assert [round(len(pcm) / 1600) for pcm in endpoint.heard] == [8, 17]


# --- words ---

LINGERS, COMPLETE = "I would like to, um.", "I would like a coffee please."


async def with_words(text: str | Exception, score: float) -> tuple[GatewayParts, list[dict]]:
    """A turn whose recogniser hears this text."""
    words = [text] if isinstance(text, Exception) else written(text)
    shared = listening(
        FakeEndpoint(score),
        scripts=[words, spoken("Yes.")],
        prefills_at_pauses=True,
        speculate_ms=None,
    )
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600))
        events = await silent_for(client, 3200)
    return shared, events


def words_said(shared: GatewayParts, says: str) -> float:
    name = "sglang_live_gateway_pause_words_total"
    return shared.metrics.registry.get_sample_value(name, {"says": says}) or 0


async def test_words_that_break_off_are_waited_for_longer():
    shared, events = await with_words(LINGERS, VAGUE)
    expected = judged(VAGUE, cutoff_ms("auto"), word_evidence(LINGERS)).wait_ms
    assert expected > waited_ms("auto", VAGUE) + 200
    assert ended_after_ms(events) == pytest.approx(expected, abs=64)
    assert words_said(shared, "goes_on") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [(COMPLETE, "none"), ("", "none"), (StageFailedError("the recogniser failed"), "failed")],
)
async def test_other_words_and_a_failure_leave_it_to_the_sound(text, says):
    shared, events = await with_words(text, VAGUE)
    assert ended_after_ms(events) == pytest.approx(waited_ms("auto", VAGUE), abs=64)
    assert words_said(shared, says) == 1


async def test_words_are_those_up_to_the_pause_and_heard_once():
    shared, _ = await with_words(LINGERS, VAGUE)
    [asked] = [turn for turn in shared.orchestrator.turns if turn.transcribes]
    parts = [part for item in asked.history for part in item.parts]
    [clip] = [part for part in parts if isinstance(part, AudioPart)]
    [prefilled] = shared.orchestrator.session.prefilled
    assert np.array_equal(clip.pcm, prefilled.history[0].parts[0].pcm)


async def test_words_that_no_prefill_has_recognised_are_not_asked_for():
    shared = listening(
        FakeEndpoint(VAGUE),
        scripts=[spoken("Yes.")],
        prefills_at_pauses=True,
        speculate_ms=None,
    )
    async with connected(shared.orchestrator, shared) as client:
        shared.orchestrator.session.prefill_turn = lambda turn: False
        await semantic(client)
        client.append(tone(600))
        events = await silent_for(client, 2000)
    assert ended_after_ms(events) == pytest.approx(waited_ms("auto", VAGUE), abs=64)
    assert not [turn for turn in shared.orchestrator.turns if turn.transcribes]


async def test_words_of_an_earlier_pause_do_not_count():
    gate = asyncio.Event()
    shared = listening(
        FakeEndpoint(VAGUE),
        scripts=[[gate, *written(LINGERS)], written(COMPLETE), spoken("Yes.")],
        prefills_at_pauses=True,
        speculate_ms=None,
    )
    async with connected(shared.orchestrator, shared) as client:
        await semantic(client)
        client.append(tone(600))
        await silent_for(client, 300)
        client.append(tone(400))
        await silent_for(client, 300)
        gate.set()
        events = await silent_for(client, 2000)
    silent_ms = ended_after_ms(events, 600 + 300 + 400)
    assert silent_ms == pytest.approx(waited_ms("auto", VAGUE), abs=64)


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
            events = await scored(client)
            if "input_audio_buffer.speech_stopped" in types(events):
                ended_ms.append((at + size) / 48)
    assert len(offline_ms) >= 2
    # Offline a verdict takes 50 ms, here it is known with the packet.
    assert ended_ms == pytest.approx(offline_ms, abs=VERDICT_MS + PACKET_MS)
