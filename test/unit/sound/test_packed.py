"""Packed speech: how much smaller it is, and how little of it changes."""

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.core import AudioPart
from sglang_live.sound.packed import PackedSound, digest_of

DATA = Path(__file__).parents[2] / "data" / "audio"
RECORDINGS = sorted(path.name for path in DATA.glob("sp_*.flac"))
BLOCK = 4096


def recording(name: str) -> np.ndarray:
    return sf.read(DATA / name, dtype="int16")[0]


@pytest.mark.parametrize("name", RECORDINGS)
def test_speech_takes_less_than_a_third_and_the_noise_is_below_that_of_mu_law(name):
    pcm = recording(name)
    packed = PackedSound.of(pcm)
    assert len(packed.data) < 0.3 * pcm.nbytes
    noise = packed.pcm().astype(np.float64) - pcm
    assert np.mean(noise**2) < 1e-4 * np.mean(pcm.astype(np.float64) ** 2)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    n=st.integers(1, 3 * BLOCK),
    level=st.sampled_from([0, 1, 3, 100, 3000, 20_000, 200_000]),
    offset=st.sampled_from([0, -32768, 32767, 500]),
    seed=st.integers(0, 99),
)
def test_any_sound_keeps_its_length_and_its_level(n, level, offset, seed):
    noise = np.random.default_rng(seed).normal(0, level, n)
    pcm = np.clip(noise + offset, -32768, 32767).astype(np.int16)
    unpacked = PackedSound.of(pcm).pcm()
    assert unpacked.shape == pcm.shape and unpacked.dtype == np.int16
    error = unpacked.astype(np.float64) - pcm
    # 40 dB below the block that an error is in, or below what is 20 dB softer than the whole.
    power = np.mean(pcm.astype(np.float64) ** 2)
    for begin in range(0, n, BLOCK):
        own = np.sum(pcm[begin : begin + BLOCK].astype(np.float64) ** 2) / BLOCK
        softest = 0.01 * power * n / (-(-n // BLOCK) * BLOCK)
        most = np.sqrt(12e-4 * max(own, softest))
        assert np.abs(error[begin : begin + BLOCK]).max() <= max(most, 0)


def test_soft_sound_is_not_changed():
    pcm = np.random.default_rng(1).normal(0, 20, 16_000).astype(np.int16)
    assert np.array_equal(PackedSound.of(pcm).pcm(), pcm)


def test_a_part_is_the_same_stretch_before_and_after():
    pcm = recording("sp_librivox_0880.flac")
    raw = AudioPart(pcm)
    packed = raw.packed()
    assert raw.packed() is packed, "it is packed once"
    assert packed.packed() is packed and AudioPart(pcm[:0]).packed().n_samples == 0
    assert (packed.n_samples, packed.duration_s) == (raw.n_samples, raw.duration_s)
    assert packed.digest == raw.digest == digest_of(pcm)
    assert packed.size_bytes < raw.size_bytes == pcm.nbytes
    stretch = AudioPart(packed.sound, 1000, 5000)
    assert stretch.n_samples == len(stretch.pcm) == 4000
    assert np.array_equal(stretch.pcm, packed.pcm[1000:5000])
