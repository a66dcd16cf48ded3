"""What the speech models of the tests of this folder say and hear."""

from pathlib import Path

import numpy as np
import soundfile as sf
import soxr

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.models.speech import Pcm, Speech

# Without numbers, which the recogniser writes as digits.
SENTENCES = (
    "Hello there, what can I do for you today?",
    "The weather in Paris is sunny, with a light breeze from the west.",
    "I would like to book a table near the window for tomorrow evening.",
    "Please tell me the way to the nearest railway station.",
    "My sister has a small garden behind her house.",
    "The train to London leaves in about half an hour.",
    "Could you explain how a bicycle stays upright?",
    "She opened the old book and began to read aloud.",
    "We walked along the river until the sun went down.",
    "A good teacher listens before giving any answer.",
)


def recording(path: Path) -> Pcm:
    """A file as [n] int16, mono, at INPUT_RATE_HZ."""
    wave, rate_hz = sf.read(path, dtype="float32", always_2d=True)
    return as_pcm(wave.mean(axis=1), rate_hz)


def as_heard(speech: Speech, rate_hz: int, end_s: float | None = None) -> Pcm:
    """Speech, up to `end_s`, as the recogniser takes it."""
    n_samples = len(speech.pcm) if end_s is None else round(end_s * rate_hz)
    return as_pcm(speech.pcm[:n_samples].astype(np.float32) / 32768, rate_hz)


def as_pcm(wave: np.ndarray, rate_hz: int) -> Pcm:
    resampled = soxr.resample(wave, rate_hz, INPUT_RATE_HZ)
    return (np.clip(resampled, -1, 1) * 32767).astype(np.int16)
