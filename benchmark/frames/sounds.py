"""Sounds of an open microphone: speech, silence, noise, music. 24 kHz, int16 [n]."""

from pathlib import Path

import numpy as np

from benchmark.frames.stream import load_speech
from sglang_live.client import clip

_SECONDS = 20
_N = _SECONDS * clip.SAMPLE_RATE_HZ
_FULL = 32767
# Triads of a slow tune, in Hz.
_CHORDS_HZ = ((262, 330, 392), (220, 262, 330), (175, 220, 262), (196, 247, 294))


def endless_sounds(clips: Path, seed: int) -> dict[str, np.ndarray]:
    """Sounds by name. The same seed gives the same sounds."""
    rng = np.random.default_rng(seed)
    speech = load_speech(clips)
    other = np.roll(speech, len(speech) // 2)
    return {
        "speech": speech,
        "overlap": ((speech.astype(np.int32) + other) // 2).astype(np.int16),
        "silence": np.zeros(_N, np.int16),
        "near silence": _at(rng.standard_normal(_N), -66),
        "noise": _at(_pink(rng), -20),
        "music": _at(_music(), -20),
    }


def _pink(rng: np.random.Generator) -> np.ndarray:
    spectrum = np.fft.rfft(rng.standard_normal(_N))
    return np.fft.irfft(spectrum / np.sqrt(np.maximum(np.arange(len(spectrum)), 1)), _N)


def _music() -> np.ndarray:
    """Struck chords, two a second, each tone with overtones that fade."""
    n = clip.SAMPLE_RATE_HZ // 2
    t = np.arange(n) / clip.SAMPLE_RATE_HZ
    struck = [
        sum(
            np.sin(2 * np.pi * tone_hz * k * t) / k * np.exp(-3 * k * t)
            for tone_hz in chord
            for k in (1, 2, 3, 4)
        )
        for chord in _CHORDS_HZ
    ]
    return np.concatenate([struck[(i // 2) % len(struck)] for i in range(_N // n)])


def _at(samples: np.ndarray, rms_dbfs: float) -> np.ndarray:
    scaled = samples * (10 ** (rms_dbfs / 20) / np.sqrt(np.mean(np.square(samples))))
    return (np.clip(scaled, -1, 1) * _FULL).astype(np.int16)
