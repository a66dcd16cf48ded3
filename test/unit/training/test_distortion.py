"""A distortion of features has the effect of the same distortion of the sound."""

import numpy as np
import pytest
import torch

from training.demo.distortion import Distortion
from training.demo.hearing import features

NOTHING = {"stretch": 0.0, "masks": 0}
RATE_HZ = 16_000


def _sound() -> np.ndarray:
    """A second and a half of tones under a voice's envelope, with a pause in the middle."""
    at_s = np.arange(round(1.5 * RATE_HZ)) / RATE_HZ
    tones = sum(np.sin(2 * np.pi * 140 * k * at_s) / k for k in range(1, 30))
    return (0.1 * tones * (np.abs(at_s - 0.75) > 0.2)).astype(np.float32)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_distortion_of_zero_changes_nothing():
    mel = features(_sound())
    assert torch.allclose(Distortion(**NOTHING).apply(mel, _generator()), mel, atol=1e-6)


@pytest.mark.parametrize("snr_db", [5.0, 20.0])
def test_noise_on_features_is_as_loud_as_noise_on_the_sound(snr_db):
    sound = _sound()
    rng = np.random.default_rng(0)
    spoken = sound[np.abs(sound) > 0]
    level = np.sqrt(np.mean(np.square(spoken))) * 10 ** (-snr_db / 20)
    heard = features((sound + level * rng.standard_normal(len(sound))).astype(np.float32))
    distortion = Distortion(**NOTHING, snr_db=(snr_db, snr_db))
    made = [distortion.apply(features(sound), _generator(seed)) for seed in range(40)]
    pause = slice(60, 90)
    # The colour of noise is random: white is the one that is brightest.
    brightest = max(made, key=lambda mel: mel[-20:, pause].mean().item())
    off_db = 40 * (brightest - heard)[:, pause].mean()
    assert abs(off_db) < 3, off_db


def test_every_draw_differs_and_a_seed_repeats_it():
    wild = Distortion(warp=0.2, colour=0.4, snr_db=(5, 30))
    mel = features(_sound())
    same, again, other = (wild.apply(mel, _generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(same, again)
    assert same.shape != other.shape or not torch.allclose(same, other, atol=0.05)
    assert all(made.isfinite().all() for made in (same, other))


def test_a_warped_tone_moves_by_the_share_of_its_band():
    mel = torch.zeros(128, 50)
    mel[60] = 1.0
    places = {
        Distortion(**NOTHING, warp=0.2).apply(mel, _generator(seed)).mean(1).argmax().item()
        for seed in range(60)
    }
    assert 48 <= min(places) < 52 and 68 < max(places) <= 72


def test_a_faded_distortion_is_weaker_and_a_fully_faded_one_changes_nothing():
    whole = Distortion(stretch=0.1, warp=0.2, colour=0.4, snr_db=(10, 40), masks=0)
    mel = features(_sound())
    nothing = whole.faded(0.0).apply(mel, _generator())
    loud = mel > mel.max() - 0.5  # noise at 50 dB is left
    assert torch.allclose(nothing[loud], mel[loud], atol=0.05)
    assert whole.faded(1.0) == whole
    half = whole.faded(0.5)
    assert (half.stretch, half.warp, half.colour) == (0.05, 0.1, 0.2)
    assert 10 < half.snr_db[0] < 50 and 40 < half.snr_db[1] < 50
