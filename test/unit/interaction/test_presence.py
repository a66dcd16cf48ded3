"""Speech in a clip, by the bundled network and recordings of people."""

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

from sglang_live.interaction.presence import has_speech, speech_only, utterances
from sglang_live.interaction.silero import SileroModel

AUDIO = Path(__file__).parents[2] / "data" / "audio"
SPOKEN = ("sp_jfk", "sp_librivox_0880", "sp_cv651325")
RATE_HZ = 16_000
T = np.arange(10 * RATE_HZ) / RATE_HZ


@pytest.fixture(scope="module")
def model() -> SileroModel:
    return SileroModel()


def recorded(name: str, gain_db: float = 0.0) -> np.ndarray:
    pcm, _ = sf.read(AUDIO / f"{name}.flac", dtype="int16")
    return np.rint(pcm * 10 ** (gain_db / 20)).astype(np.int16)


def noise(level: float) -> np.ndarray:
    return np.random.default_rng(1).normal(0, level, len(T))


SOUNDLESS = {
    "digital silence": np.zeros(len(T)),
    "the last bit": np.random.default_rng(2).integers(-1, 2, len(T)),
    "quiet noise": noise(5),
    "loud noise": noise(3000),
    "a DC offset": np.full(len(T), 5000),
    "noise on a DC offset": 5000 + noise(20),
    "hum": 3000 * np.sin(2 * np.pi * 50 * T) + 1000 * np.sin(2 * np.pi * 150 * T),
    "a tone": 8000 * np.sin(2 * np.pi * 440 * T),
    "a sweep": 8000 * np.sin(2 * np.pi * (100 + 50 * T) * T),
    "a click": np.where(np.arange(len(T)) == 80_000, 30_000, 0),
    "clicks": np.where(np.arange(len(T)) % 8000 < 20, 30_000, 0),
    "a square wave": 5000 * np.sign(np.sin(2 * np.pi * 120 * T)),
    "50 ms of tone": 8000 * np.sin(2 * np.pi * 300 * T[:800]),
    "one sample": np.ones(1),
    "nothing": np.zeros(0),
}


@pytest.mark.parametrize("name", SOUNDLESS)
def test_noise_is_not_taken_for_speech(name, model):
    pcm = np.clip(SOUNDLESS[name], -32768, 32767).astype(np.int16)
    assert not has_speech(pcm, model)
    assert len(speech_only(pcm, model)) == 0


def test_a_whale_is_not_taken_for_speech(model):
    assert not has_speech(recorded("no_humpback_6s"), model)


def test_50_ms_of_speech_hold_no_word(model):
    assert not has_speech(recorded("sp_jfk")[8000:8800], model)


@pytest.mark.parametrize("gain_db", [0, -20, -40, -50])
@pytest.mark.parametrize("name", SPOKEN)
def test_quiet_speech_is_found(name, gain_db, model):
    assert has_speech(recorded(name, gain_db), model)


@pytest.mark.parametrize("gain_db", [0, -40])
def test_speech_is_kept_whole_and_the_silence_around_it_is_not(gain_db, model):
    speech = recorded("sp_librivox_0880", gain_db)
    silence = np.zeros(10 * RATE_HZ, np.int16)
    kept = speech_only(np.concatenate((silence, speech, silence, speech, silence)), model)
    # Both times, with at most the padding and the pauses of a recording.
    assert 2 * (len(speech) - RATE_HZ) < len(kept) <= 2 * (len(speech) + RATE_HZ)
    assert kept.astype(float).std() == pytest.approx(speech.astype(float).std(), rel=0.15)


def test_a_clip_without_long_silences_stays_as_it_is(model):
    speech = recorded("sp_jfk")
    assert speech_only(speech, model) is speech


def test_quiet_speech_beside_a_loud_click_is_found(model):
    speech = recorded("sp_librivox_0880", -40)
    speech[200:220] = 30_000
    assert has_speech(speech, model)


def test_a_recording_is_divided_at_its_pauses(model):
    said, pause = recorded("sp_librivox_0880"), np.zeros(16_000, np.int16)
    found = utterances(np.concatenate([said, pause] * 3), model)
    alone = len(utterances(said, model))
    assert len(found) == 3 * alone
    assert sum(map(len, found)) <= 3 * (len(said) + len(pause))
    assert utterances(pause, model) == []
