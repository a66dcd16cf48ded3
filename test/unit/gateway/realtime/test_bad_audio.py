"""Audio as microphones really send it, through the real speech model: the turns stay the same."""

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from scipy.signal import resample_poly

from sglang_live.gateway.audio.codec import FORMATS, WireFormat, encode_clip
from sglang_live.interaction.scoring import SpeechScorer
from sglang_live.interaction.silero import SileroModel
from test.unit.gateway.fakes import FakeOrchestrator, connected, services, types

DATA = Path(__file__).parents[3] / "data" / "audio"
STARTED, STOPPED = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"
RATE_HZ = 16_000
# Longer than the pauses of the recordings.
SILENCE_MS = 1_500


def recording(name: str) -> np.ndarray:
    samples, rate_hz = sf.read(DATA / name, dtype="float64")
    assert rate_hz == RATE_HZ
    return samples


def quiet(seconds: float) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 1e-4, round(seconds * RATE_HZ))


CLIP = recording("sp_librivox_0880.flac")
USER = np.concatenate((quiet(1.0), CLIP, quiet(2.5)))


async def turns_of(samples: np.ndarray, form: WireFormat = FORMATS["audio/pcm"]) -> list[tuple]:
    """Start and end, in ms, of the turns of a microphone."""
    pcm = (32_768 * samples).clip(-32_768, 32_767).astype(np.int16)
    raw = encode_clip(pcm, form)
    orchestrator = FakeOrchestrator()
    shared = services(orchestrator)
    shared.scorer = SpeechScorer(SileroModel())
    async with connected(orchestrator, shared) as client:
        detection = {"silence_duration_ms": SILENCE_MS, "create_response": False}
        client.update(audio={"input": {"format": form.to_json(), "turn_detection": detection}})
        await client.until("session.updated")
        events = []
        size = form.n_bytes(200)
        for at in range(0, len(raw), size):
            client.append(raw[at : at + size])
            events += await client.settle()
    shared.close()
    assert types(events).count(STARTED) == types(events).count(STOPPED)
    starts = [event["audio_start_ms"] for event in events if event["type"] == STARTED]
    ends = [event["audio_end_ms"] for event in events if event["type"] == STOPPED]
    return list(zip(starts, ends, strict=True))


VARIANTS = {
    "clipped": (8 * USER).clip(-0.5, 0.5),
    "clipped at full scale": (20 * USER).clip(-1, 1),
    "an offset": USER + 0.2,
    "an offset that clips": (4 * USER + 0.8).clip(-1, 1),
    "soft": USER * 10 ** (-20 / 20),
    "mains hum": USER + 0.02 * np.sin(2 * np.pi * 50 * np.arange(len(USER)) / RATE_HZ),
    "telephone band": resample_poly(resample_poly(USER, 1, 2), 2, 1)[: len(USER)],
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
async def test_a_bad_microphone_gives_the_same_turn(variant):
    [(start, end)] = await turns_of(USER)
    [found] = await turns_of(variant)
    assert found == (pytest.approx(start, abs=200), pytest.approx(end, abs=300))


@pytest.mark.parametrize("form", ["audio/pcmu", "audio/pcma"])
async def test_telephone_codecs_give_the_same_turn(form):
    [(start, end)] = await turns_of(USER)
    [found] = await turns_of(USER, FORMATS[form])
    assert found == (pytest.approx(start, abs=200), pytest.approx(end, abs=300))


@pytest.mark.parametrize("offset", [-1.0, -0.2, 0.3, 1.0])
async def test_an_offset_alone_is_no_voice(offset):
    assert await turns_of(np.full(4 * RATE_HZ, offset)) == []


async def test_a_monologue_is_one_turn():
    seconds = len(CLIP) / RATE_HZ
    times = int(32 / seconds) + 1
    [(start, end)] = await turns_of(np.concatenate((quiet(1.0), *[CLIP] * times, quiet(2.5))))
    assert start < 1_200
    assert end == pytest.approx(1_000 * (1 + times * seconds) + SILENCE_MS, abs=500)


async def test_two_people_at_once_are_one_turn():
    other = recording("sp_jfk.flac")[: len(CLIP) + RATE_HZ]
    both = np.concatenate((quiet(1.0), other, quiet(2.5)))
    both[RATE_HZ : RATE_HZ + len(CLIP)] += CLIP
    [(start, end)] = await turns_of(both)
    assert start < 1_500
    assert end == pytest.approx(1_000 * (1 + len(other) / RATE_HZ) + SILENCE_MS, abs=500)
