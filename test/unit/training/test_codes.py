"""Codes describe the sound that they were made from; rooms add the noise that is set."""

import numpy as np
import pytest
import torch

from training.demo.acoustics import Room, background_noise
from training.demo.codes import Codebooks, low_frames, mel_frames, whole_frames
from training.demo.sizes import FRAME_SAMPLES, N_CODEBOOKS, SIZE


def voice(seconds: float, pitch_hz: float, seed: int) -> np.ndarray:
    """A sound with a pitch, overtones and a varying level."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * 24_000)) / 24_000
    wave = sum(np.sin(2 * np.pi * k * pitch_hz * t + rng.uniform(0, 6)) / k for k in range(1, 20))
    level = 0.5 + 0.5 * np.sin(2 * np.pi * 3 * t + rng.uniform(0, 6))
    return (0.1 * wave * level).astype(np.float32)


@pytest.fixture(scope="module")
def recordings() -> list[np.ndarray]:
    return [whole_frames(voice(2.0, 90 + 5 * n, n), 1, 1) for n in range(8)]


@pytest.fixture(scope="module")
def codebooks(recordings) -> Codebooks:
    return Codebooks.fit(recordings, seed=1)


def test_recordings_are_whole_frames_with_silence_around():
    framed = whole_frames(np.ones(FRAME_SAMPLES + 1, np.float32), 2, 1)
    assert len(framed) == 5 * FRAME_SAMPLES
    assert not framed[: 2 * FRAME_SAMPLES].any() and not framed[-FRAME_SAMPLES:].any()


def test_every_frame_has_a_code_of_every_book(codebooks, recordings):
    codes = codebooks.encode(recordings[0])
    assert codes.shape == (N_CODEBOOKS, len(recordings[0]) // FRAME_SAMPLES)
    assert codes.min() >= 0 and codes.max() < SIZE.codebook_size


def test_the_mean_of_embeddings_is_the_frame(codebooks, recordings):
    """The vocoder gets a frame's principal components and the phase of its pitch."""
    codes = codebooks.encode(recordings[0])
    offsets = torch.arange(N_CODEBOOKS)[:, None] * SIZE.codebook_size
    seen = codebooks.embedding()[codes + offsets].mean(0)
    spectrum = (mel_frames(recordings[0]) - codebooks.mean) @ codebooks.components
    phase = low_frames(recordings[0])
    scale = codebooks.spectrum[0].std()
    raised = torch.linspace(0, 1.2, 96).exp()
    error = (seen[:, :96] / raised * scale - spectrum).square().mean() / spectrum.var()
    assert error < 0.1
    error = (seen[:, 96:] * codebooks.phase[0].std() - phase).square().mean() / phase.var()
    assert error < 0.1


def test_the_phase_follows_the_wave():
    wave = whole_frames(voice(1.0, 100, 1), 0, 0)
    later = np.roll(wave, FRAME_SAMPLES // 32)  # by one sample of the low band
    kept, moved = low_frames(wave).flatten(), low_frames(later).flatten()
    np.testing.assert_allclose(moved[64:-64], kept[63:-65], atol=0.05)


@pytest.mark.parametrize("snr_db", [5.0, 15.0, 30.0])
def test_noise_has_the_level_that_is_set(snr_db):
    rng = np.random.default_rng(1)
    speech = voice(1.0, 100, 1)[::2]
    room = Room(
        echo=0.0, decay_s=0.01, snr_db=snr_db, tilt=1.0, peak=0.5, before_s=1.0, after_s=1.0
    )
    heard = room.apply(speech, rng)
    assert np.abs(heard).max() == pytest.approx(0.5, rel=1e-3)
    noise = heard[:15_000]
    both = heard[16_000 : 16_000 + len(speech)]
    ratio = (both.var() - noise.var()) / noise.var()
    assert 10 * np.log10(ratio) == pytest.approx(snr_db, abs=1.5)


def test_background_noise_fills_its_duration_without_clipping():
    sound = background_noise(np.random.default_rng(1), 1.5)
    assert (sound.dtype, len(sound)) == (np.float32, 24_000)
    assert 0 < np.abs(sound).max() <= 1
