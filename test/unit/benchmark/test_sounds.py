import numpy as np
import pytest

from benchmark.load.sounds import LEVEL_RMS, false_trigger_sounds
from sglang_live.client import clip


def speech() -> bytes:
    """A second of murmur with a loud syllable in it."""
    rng = np.random.default_rng(0)
    samples = rng.normal(0, 200, clip.SAMPLE_RATE_HZ)
    samples[9600:14400] *= 40
    return samples.astype("<i2").tobytes()


def test_sounds_are_the_same_every_time():
    assert false_trigger_sounds(speech()) == false_trigger_sounds(speech())


@pytest.mark.parametrize("name", ["noise", "cough", "music", "back_channel"])
def test_a_sound_is_short_and_as_loud_as_speech(name):
    pcm = false_trigger_sounds(speech())[name]
    assert 0.1 <= clip.duration_s(pcm) <= 0.2
    rms = np.sqrt(np.mean((np.frombuffer(pcm, "<i2") / 32767) ** 2))
    assert rms == pytest.approx(LEVEL_RMS, rel=0.05)
