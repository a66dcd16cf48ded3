"""Sounds of 100 to 200 ms that a microphone picks up and that are no turn.

Generated from a fixed seed, except for the back-channel, which is cut from a clip.
"""

import numpy as np

from sglang_live.client import clip

# As loud as speech near the microphone: a quieter sound would be too easy to distinguish.
LEVEL_RMS = 0.1
FADE_S = 0.005
_SEED = 20_24


def false_trigger_sounds(speech: bytes) -> dict[str, bytes]:
    """24 kHz PCM16 by name.

    speech: the clip that the back-channel is cut from.
    """
    rng = np.random.default_rng(_SEED)
    sounds = {
        "noise": rng.standard_normal(_samples(0.10)),
        "cough": _cough(rng),
        "music": _chord((262.0, 330.0, 392.0), 0.20),
        "back_channel": _loudest(speech, 0.18),
    }
    return {name: _finish(samples) for name, samples in sounds.items()}


def _cough(rng: np.random.Generator) -> np.ndarray:
    """A burst of noise that decays fast, and a voiced tail under it."""
    t = np.arange(_samples(0.16)) / clip.SAMPLE_RATE_HZ
    # Differences of noise over 4 samples have the dull spectrum of a cough, not a hiss.
    burst = np.convolve(rng.standard_normal(len(t)), np.ones(4) / 4, mode="same")
    tail = 0.3 * np.sign(np.sin(2 * np.pi * 110 * t))
    return burst * np.exp(-t / 0.03) + tail * np.exp(-t / 0.08)


def _chord(tones_hz: tuple[float, ...], duration_s: float) -> np.ndarray:
    t = np.arange(_samples(duration_s)) / clip.SAMPLE_RATE_HZ
    return sum(np.sin(2 * np.pi * tone_hz * t) for tone_hz in tones_hz)


def _loudest(speech: bytes, duration_s: float) -> np.ndarray:
    samples = np.frombuffer(speech, "<i2").astype(float)
    n = min(_samples(duration_s), len(samples))
    energy = np.cumsum(np.concatenate([[0.0], samples**2]))
    start = int(np.argmax(energy[n:] - energy[:-n]))
    return samples[start : start + n]


def _finish(samples: np.ndarray) -> bytes:
    n_fade = _samples(FADE_S)
    fade = np.minimum(1.0, np.arange(len(samples)) / n_fade)
    # Without the fades the sound would begin and end with a click.
    faded = samples * fade * fade[::-1]
    scaled = faded * LEVEL_RMS / np.sqrt(np.mean(faded**2))
    return (np.clip(scaled, -1.0, 1.0) * 32767).astype("<i2").tobytes()


def _samples(duration_s: float) -> int:
    return round(duration_s * clip.SAMPLE_RATE_HZ)
