"""Acoustics between a speaker and the server: reverberation, noise, level, silence around it."""

from dataclasses import dataclass

import numpy as np

from training.demo.voices import QUESTION_RATE_HZ


@dataclass(frozen=True, slots=True)
class Room:
    """Acoustics of one recording.

    Attributes:
        echo: level of the reverberation relative to the direct sound, 0 to about 0.3.
        decay_s: time in which the reverberation falls by 60 dB.
        snr_db: speech to noise, over the speech.
        tilt: 0 white noise, 1 pink noise, 2 brown noise.
        peak: peak of the result, at most 1.
        before_s, after_s: noise without speech before and after it.
    """

    echo: float
    decay_s: float
    snr_db: float
    tilt: float
    peak: float
    before_s: float
    after_s: float

    @classmethod
    def random(cls, rng: np.random.Generator, snr_db: float | None = None) -> "Room":
        return cls(
            echo=0.3 * rng.random() ** 2,
            decay_s=rng.uniform(0.05, 0.5),
            snr_db=rng.uniform(8, 45) if snr_db is None else snr_db,
            tilt=rng.uniform(0, 2),
            peak=10 ** rng.uniform(-1.5, -0.05),
            before_s=rng.uniform(0.05, 0.7),
            after_s=rng.uniform(0.1, 0.8),
        )

    def apply(self, speech: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Speech as recorded in this room, float32 at 16 kHz; longer by before_s and after_s."""
        before = round(self.before_s * QUESTION_RATE_HZ)
        after = round(self.after_s * QUESTION_RATE_HZ)
        sound = np.pad(_reverberated(speech, self, rng), (before, after))
        noise = _noise(len(sound), self.tilt, rng)
        level = float(np.sqrt(np.mean(np.square(speech)))) if len(speech) else 0.0
        sound = sound + noise * level * 10 ** (-self.snr_db / 20)
        return (sound * (self.peak / max(np.abs(sound).max(), 1e-9))).astype(np.float32)


def background_noise(rng: np.random.Generator, duration_s: float) -> np.ndarray:
    """A room without speech: noise of any colour, hum, knocks. float32 samples at 16 kHz."""
    n = round(duration_s * QUESTION_RATE_HZ)
    sound = _noise(n, rng.uniform(0, 2), rng)
    if rng.random() < 0.3:
        hum_hz = rng.choice([50.0, 60.0, 120.0, 440.0])
        sound = sound + np.sin(2 * np.pi * hum_hz * np.arange(n) / QUESTION_RATE_HZ)
    for _ in range(rng.integers(0, 4)):
        at = rng.integers(0, n)
        knock = _noise(n - at, 1.0, rng) * np.exp(-np.arange(n - at) / rng.uniform(100, 1500))
        sound[at:] += 20 * knock
    return (sound * (10 ** rng.uniform(-4, -0.5) / np.abs(sound).max())).astype(np.float32)


def _reverberated(speech: np.ndarray, room: Room, rng: np.random.Generator) -> np.ndarray:
    n = max(2, round(room.decay_s * QUESTION_RATE_HZ))
    tail = rng.standard_normal(n) * 10 ** (-3 * np.arange(n) / n)
    tail *= room.echo / np.sqrt(np.sum(np.square(tail)))
    tail[0] = 1.0
    size = 1 << (len(speech) + n - 1).bit_length()
    wet = np.fft.irfft(np.fft.rfft(speech, size) * np.fft.rfft(tail, size), size)
    return wet[: len(speech) + n]


def _noise(n: int, tilt: float, rng: np.random.Generator) -> np.ndarray:
    """Noise of RMS 1 whose power falls with frequency to the power of `tilt`."""
    size = 1 << max(1, int(n - 1).bit_length())
    spectrum = np.fft.rfft(rng.standard_normal(size))
    spectrum *= np.maximum(np.arange(len(spectrum)), 1.0) ** (-tilt / 2)
    noise = np.fft.irfft(spectrum, size)[:n]
    return noise / max(float(np.sqrt(np.mean(np.square(noise)))), 1e-12)
