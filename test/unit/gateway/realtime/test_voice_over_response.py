"""A voice over a response: a back-channel, side talk or a turn, and what a client learns of it."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.signal import resample_poly

from sglang_live.core import OUTPUT_RATE_HZ, AudioDelta, TranscriptDelta
from sglang_live.errors import StageFailedError
from sglang_live.interaction.scoring import SpeechScorer
from sglang_live.interaction.silero import SileroModel
from test.unit.gateway.fakes import connected, done, paced, spoken, tone, types, voice

from .playback_world import DELTA, SILENCE_300MS, STARTED, World, interrupted_end, start

SUSPECTED, IGNORED = (f"input_audio_buffer.voice_{what}" for what in ("suspected", "ignored"))
STOPPED = "input_audio_buffer.speech_stopped"
# Voiced by the fake detector, without hiss.
HUM = tone(350)
LONG_HUM = tone(600)
DATA = Path(__file__).parents[3] / "data" / "audio"


def long_response(*after) -> list:
    """A response that goes on for longer than any test."""
    return [TranscriptDelta("Well, ", 1), AudioDelta(tone(8_000)), asyncio.Event(), *after]


async def told(client) -> None:
    client.turn_detection({"ignore_backchannels": True, "ignore_echo": False})
    await client.until("session.updated")


async def without_echo(client) -> None:
    """What the client sends is a tone, as the response is."""
    client.turn_detection({"ignore_echo": False})
    await client.until("session.updated")


def decisions(world) -> dict[tuple[str, str], float]:
    [metric] = world.shared.metrics.voice_over_response.collect()
    return {
        (sample.labels["decision"], sample.labels["reason"]): sample.value
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


async def test_a_hum_is_a_backchannel_and_leaves_no_item():
    world = World(long_response())
    async with world.connect() as client:
        await without_echo(client)
        await start(client)
        client.append(HUM)
        client.append(SILENCE_300MS)
        assert await client.settle() == []
    assert decisions(world) == {("backchannel", "short"): 1}


async def test_with_the_setting_off_the_same_hum_interrupts():
    world = World(long_response(), spoken("Yes?"))
    async with world.connect() as client:
        client.turn_detection({"ignore_echo": False, "ignore_backchannels": False})
        await client.until("session.updated")
        await start(client)
        client.append(HUM)
        assert STARTED in types(await client.until("response.done"))
    assert decisions(world) == {("turn", "voice"): 1}


async def test_a_hum_that_outlasts_a_backchannel_interrupts():
    world = World(long_response(), spoken("Yes?"))
    async with world.connect() as client:
        await without_echo(client)
        await start(client)
        client.append(LONG_HUM)
        [started] = [e for e in await client.until("response.done") if e["type"] == STARTED]
        assert started["audio_start_ms"] == 0
    assert decisions(world) == {("turn", "lasting"): 1}


async def test_a_voice_with_hiss_interrupts_as_soon_as_it_is_confirmed():
    world = World(long_response(), spoken("Yes?"))
    async with world.connect() as client:
        await start(client)
        client.append(voice(300))
        assert STARTED in types(await client.until("response.done"))
    assert decisions(world) == {("turn", "voice"): 1}


async def test_in_the_last_second_of_a_response_a_short_yes_is_an_answer():
    world = World([TranscriptDelta("Shall I?", 1), AudioDelta(tone(2_000)), done("Shall I?")])
    async with world.connect() as client:
        await without_echo(client)
        await start(client)
        await client.settle()
        world.clock.advance(1.2)
        client.append(HUM)
        assert STARTED in types(await client.settle())


async def test_a_client_that_set_the_extension_learns_each_decision():
    world = World(long_response(), spoken("Yes?"))
    async with world.connect() as client:
        await told(client)
        await start(client)
        client.append(HUM)
        client.append(SILENCE_300MS)
        suspected, ignored = await client.settle()
        assert (suspected["type"], suspected["audio_start_ms"]) == (SUSPECTED, 0)
        assert ignored["type"] == IGNORED
        assert (ignored["decision"], ignored["reason"]) == ("backchannel", "short")
        assert 300 <= ignored["audio_end_ms"] - ignored["audio_start_ms"] <= 400
        client.append(LONG_HUM)
        events = types(await client.until("response.done"))
        assert events[:2] == [SUSPECTED, STARTED]
        assert IGNORED not in events


async def test_a_client_that_stops_sending_learns_that_the_audio_goes_on():
    world = World(long_response())
    async with world.connect() as client:
        await told(client)
        await start(client)
        client.append(HUM)
        await client.expect(SUSPECTED)
        world.clock.advance(1.3)
        [ignored] = await client.settle()
        assert (ignored["type"], ignored["decision"]) == (IGNORED, "undecided")


async def test_a_false_alarm_costs_no_more_than_its_limit_of_silence():
    gate = asyncio.Event()
    world = World([TranscriptDelta("Well, ", 1), AudioDelta(tone(400)), gate, *paced("then", 5)])
    async with world.connect() as client:
        await without_echo(client)
        await start(client)
        client.append(tone(150))
        await client.settle()
        gate.set()
        # 0.4 s are in the client's buffer.
        await client.settle()
        world.clock.advance(0.65)
        assert DELTA not in types(await client.settle())
        world.clock.advance(0.1)
        assert types(await client.until("response.done")).count(DELTA) == 5
    assert world.value("audio_on_hold_seconds_total") == pytest.approx(0.75)


# --- words ---


def with_recogniser(text: str | Exception) -> World:
    words = [text] if isinstance(text, Exception) else [TranscriptDelta(text), done(text)]
    return World(long_response(), words, spoken("All right."), recognises=True)


async def test_a_short_stop_takes_the_turn_by_its_words():
    world = with_recogniser("Stop.")
    async with world.connect() as client:
        await without_echo(client)
        await start(client)
        client.append(HUM)
        client.append(SILENCE_300MS)
        events = types(await client.until("response.created"))
        assert [event for event in events if event in (STARTED, STOPPED)] == [STARTED, STOPPED]
        assert events.index("response.done") < events.index("input_audio_buffer.committed")
    assert decisions(world) == {("backchannel", "short"): 1, ("turn", "words"): 1}
    assert world.value("turn_ends_total", reason="words") == 1
    assert world.value("voice_words_total", outcome="turn") == 1


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("Mm-hmm.", "other"),
        ("Thank you.", "other"),
        ("", "none"),
        (StageFailedError("the recogniser failed"), "failed"),
    ],
)
async def test_other_words_and_a_failure_leave_the_decision(text, outcome):
    world = with_recogniser(text)
    async with world.connect() as client:
        await without_echo(client)
        await start(client)
        client.append(HUM)
        client.append(SILENCE_300MS)
        assert await client.settle() == []
    assert world.value("voice_words_total", outcome=outcome) == 1
    assert decisions(world) == {("backchannel", "short"): 1}


async def test_words_that_come_when_the_user_speaks_again_are_dropped():
    gate = asyncio.Event()
    world = World(long_response(), [gate, TranscriptDelta("Stop."), done("Stop.")], recognises=True)
    async with world.connect() as client:
        await without_echo(client)
        await start(client)
        client.append(HUM)
        client.append(SILENCE_300MS)
        client.append(LONG_HUM)
        await client.until("response.done")
        gate.set()
        assert types(await client.settle()).count(STARTED) == 0


async def test_words_that_come_after_much_silence_take_the_turn_with_all_of_its_voice():
    gate = asyncio.Event()
    words = [gate, TranscriptDelta("Stop."), done("Stop.")]
    world = World(long_response(), words, spoken("All right."), recognises=True)
    async with world.connect() as client:
        await without_echo(client)
        await start(client)
        client.append(HUM)
        for _ in range(15):
            client.append(bytes(48_000))
        await client.settle()
        gate.set()
        events = await client.until("response.created")
        assert [e["audio_start_ms"] for e in events if e["type"] == STARTED] == [0]
        await client.until("response.done")
    (part,) = world.orchestrator.turns[-1].history[-1].parts
    assert part.duration_s == pytest.approx(0.55, abs=0.05)


# --- recordings, through the real detector ---


def recording(name: str) -> np.ndarray:
    samples, rate_hz = sf.read(DATA / name, dtype="float32")
    assert rate_hz == 16_000
    return 32_768 * resample_poly(samples, 3, 2)


USER = recording("sp_librivox_0880.flac")
OTHER = recording("sp_jfk.flac")[: 3 * OUTPUT_RATE_HZ]


def pcm16(samples: np.ndarray) -> bytes:
    return samples.clip(-32_768, 32_767).astype("<i2").tobytes()


def side_talk() -> np.ndarray:
    """12 dB softer than USER, without high frequencies."""
    far = np.convolve(OTHER, np.ones(12) / 12, mode="same")
    return 10 ** (-12 / 20) * far * np.std(USER) / np.std(far)


async def heard_over_a_response(world, client, *sounds: np.ndarray) -> list[str]:
    """The user has a turn; then these sounds come over the response."""
    client.append(pcm16(np.concatenate((USER, np.zeros(OUTPUT_RATE_HZ)))))
    await client.until("response.created")
    await client.find("response.output_audio.delta")
    await client.settle()
    events = []
    for samples in sounds:
        for part in np.array_split(samples, max(1, len(samples) // (OUTPUT_RATE_HZ // 10))):
            world.clock.advance(len(part) / OUTPUT_RATE_HZ)
            client.append(pcm16(part))
            events += types(await client.settle())
    return events


@pytest.fixture
def real():
    world = World(long_response(), spoken("Yes?"))
    world.shared.scorer = SpeechScorer(SileroModel())
    yield world
    world.shared.close()


async def test_side_talk_neither_holds_nor_stops_a_response(real):
    async with real.connect() as client:
        assert await heard_over_a_response(real, client, side_talk()) == []
    assert decisions(real).keys() == {("side_talk", "far")}
    assert real.value("audio_on_hold_seconds_total") == 0


async def test_side_talk_interrupts_a_client_that_wants_it(real):
    async with real.connect() as client:
        client.turn_detection({"ignore_side_talk": False})
        await client.until("session.updated")
        assert STARTED in await heard_over_a_response(real, client, side_talk())


async def test_the_user_interrupts_after_side_talk(real):
    async with real.connect() as client:
        events = await heard_over_a_response(real, client, side_talk(), USER[:OUTPUT_RATE_HZ])
        assert STARTED in events


# --- any sequence of sounds ---

SOUNDS = {
    "hum": HUM,
    "click": tone(60),
    "voice": voice(300),
    "long hum": LONG_HUM,
    "silence": SILENCE_300MS,
    "short silence": bytes(4_800),
}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sampled_from([*SOUNDS, "wait", "clear"]), max_size=12))
def test_every_suspicion_ends_and_no_audio_stays_held(names):
    asyncio.run(_every_suspicion_ends(names))


async def _every_suspicion_ends(names: list[str]) -> None:
    world = World(*([long_response()] * 14))
    async with connected(world.orchestrator, world.shared) as client:
        world.session.on_interrupt = [interrupted_end()]
        await told(client)
        client.send("response.create")
        await client.until(DELTA)
        events = types(await client.settle())
        for name in [*names, "silence", "silence"]:
            if name == "wait":
                world.clock.advance(0.5)
            elif name == "clear":
                client.send("input_audio_buffer.clear")
            else:
                client.append(SOUNDS[name])
            events += types(await client.settle())
        open_ones = 0
        for event in events:
            open_ones += event == SUSPECTED
            open_ones -= event in (STARTED, IGNORED) and open_ones > 0
            assert 0 <= open_ones <= 1
        assert open_ones == 0
        world.clock.advance(5.0)
        await client.settle()
        held = world.value("audio_on_hold_seconds_total")
        world.clock.advance(5.0)
        assert world.value("audio_on_hold_seconds_total") == held
