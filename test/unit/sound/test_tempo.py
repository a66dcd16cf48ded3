"""Speech at another speed: its length, its pitch, its words' places, whatever its pieces."""

import random
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import soxr

from sglang_live.sound.tempo import Tempo

AUDIO = Path(__file__).parents[2] / "data" / "audio"

RATE_HZ = 24_000
SPEEDS = (0.25, 0.5, 0.8, 1.25, 1.5, 4.0)


def speech() -> np.ndarray:
    samples, rate_hz = sf.read(AUDIO / "sp_jfk.flac", dtype="float32", frames=4 * 44_100)
    return (soxr.resample(samples, rate_hz, RATE_HZ) * 32_767).astype(np.int16)


def changed(pcm: np.ndarray, speed: float, sizes=(480,)) -> np.ndarray:
    tempo, parts, begin, n = Tempo(speed, RATE_HZ), [], 0, 0
    while begin < len(pcm):
        size = sizes[n % len(sizes)]
        parts.append(tempo.push(pcm[begin : begin + size].astype("<i2").tobytes()))
        begin, n = begin + size, n + 1
    return np.frombuffer(b"".join((*parts, tempo.finish())), "<i2")


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("n", [0, 1, 500, 12_345])
def test_its_length_is_exact(speed, n):
    assert len(changed(speech()[:n], speed)) == round(n / speed)


@pytest.mark.parametrize("speed", SPEEDS)
def test_the_pieces_in_which_it_comes_change_nothing(speed):
    pcm = speech()[:24_000]
    sizes = [random.Random(3).randrange(1, 3000) for _ in range(50)]
    assert (changed(pcm, speed, sizes) == changed(pcm, speed, (len(pcm),))).all()


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_tone_keeps_its_pitch_and_its_loudness(speed):
    tone = (8000 * np.sin(2 * np.pi * 220 * np.arange(2 * RATE_HZ) / RATE_HZ)).astype(np.int16)
    heard = changed(tone, speed)[1000:-1000].astype(float)
    spectrum = np.abs(np.fft.rfft(heard * np.hanning(len(heard)), 1 << 18))
    assert np.argmax(spectrum) * RATE_HZ / (1 << 18) == pytest.approx(220, abs=1.5)
    assert np.sqrt(np.mean(heard**2)) == pytest.approx(8000 / np.sqrt(2), rel=0.02)


@pytest.mark.parametrize("speed", SPEEDS)
def test_every_sound_keeps_its_place(speed):
    """Bursts of a second in silence come at their times divided by the speed."""
    pcm = np.zeros(4 * RATE_HZ, np.int16)
    for begin_s in (0.5, 1.7, 3.0):
        begin = int(begin_s * RATE_HZ)
        pcm[begin : begin + 4800] = 8000 * np.sin(2 * np.pi * 300 * np.arange(4800) / RATE_HZ)
    heard = changed(pcm, speed)
    heard = np.abs(heard[: len(heard) // 24 * 24]).reshape(-1, 24).max(1) > 1000
    begins_ms = np.flatnonzero(heard[1:] & ~heard[:-1])
    first = [begins_ms[np.abs(begins_ms - 1000 * s / speed).argmin()] for s in (0.5, 1.7, 3.0)]
    assert first == pytest.approx([1000 * s / speed for s in (0.5, 1.7, 3.0)], abs=10 + 16 / speed)


def test_silence_stays_silent():
    assert not changed(np.zeros(RATE_HZ, np.int16), 1.25).any()


@pytest.mark.parametrize("speed", SPEEDS)
def test_the_first_sound_comes_after_at_most_50_ms_of_speech(speed):
    tempo, pcm = Tempo(speed, RATE_HZ), speech()
    assert tempo.push(pcm[: RATE_HZ // 20].tobytes())
    held = RATE_HZ // 20 / speed - len(tempo.push(b"")) // 2
    assert held / RATE_HZ * speed <= 0.05
