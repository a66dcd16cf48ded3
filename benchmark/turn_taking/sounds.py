"""Sounds that recordings are composed of: levels, silences, echo, noises.

All audio is int16 at 16 kHz. What is drawn depends only on a name.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from benchmark.turn_taking.timeline import SAMPLES_PER_MS, Span

_FRAME_MS = 10
_FULL_SCALE = 32768.0
# Speech is at most this far below the clip's loud frames, and at least this far above the quietest.
_RANGE_DB, _ABOVE_FLOOR_DB, _LEAST_RANGE_DB = 25.0, 6.0, 12.0
# A shorter sound between two silences is a click or a breath.
_MIN_SOUND_MS = 50
# Kept of a pause's own audio at both ends: words fade in and out.
_MARGIN_MS = 80
# An empty room far from the microphone, for a clip without a silence of its own.
_TONE_DB = -75.0
NEAR_DB = -26.0  # RMS of a voice or a sound near the microphone


def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def samples(ms: float) -> int:
    return round(ms * SAMPLES_PER_MS)


def to_pcm(sound: np.ndarray) -> np.ndarray:
    """[n] int16 of floats in [-1, 1]."""
    return (np.clip(sound, -1, 1) * (_FULL_SCALE - 1)).astype(np.int16)


def level_db(pcm: np.ndarray) -> float:
    """RMS in dB of full scale; -120 for digital silence."""
    rms = np.sqrt(np.mean((pcm / _FULL_SCALE) ** 2)) if len(pcm) else 0.0
    return float(20 * np.log10(max(rms, 1e-6)))


def at_level(pcm: np.ndarray, db: float) -> np.ndarray:
    """The same sound with this RMS."""
    return to_pcm(pcm / _FULL_SCALE * 10 ** ((db - level_db(pcm)) / 20))


def louder(pcm: np.ndarray, db: float) -> np.ndarray:
    """The same sound, db louder or softer."""
    return to_pcm(pcm / _FULL_SCALE * 10 ** (db / 20))


def frame_levels(pcm: np.ndarray, frame_ms: int = _FRAME_MS) -> np.ndarray:
    """[n] dB of full scale of each frame."""
    size = samples(frame_ms)
    frames = pcm[: len(pcm) // size * size].reshape(-1, size) / _FULL_SCALE
    return 20 * np.log10(np.sqrt((frames**2).mean(axis=1)) + 1e-6)


def sounding(pcm: np.ndarray) -> list[Span]:
    """Spans of sound in a recording of one speaker, by its level alone; gaps below 200 ms are
    filled."""
    db = frame_levels(pcm)
    if not len(db):
        return []
    loud, floor = np.percentile(db, 95), np.percentile(db, 5)
    least = min(max(loud - _RANGE_DB, floor + _ABOVE_FLOOR_DB), loud - _LEAST_RANGE_DB)
    spans = _joined(_runs(db >= least), gap_ms=3 * _FRAME_MS)
    return _joined([s for s in spans if s.lasts_ms >= _MIN_SOUND_MS], gap_ms=200)


def _runs(flags: np.ndarray) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [Span(float(a * _FRAME_MS), float(b * _FRAME_MS)) for a, b in pairs]


def _joined(spans: list[Span], gap_ms: float) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        if joined and span.start_ms - joined[-1].end_ms < gap_ms:
            span = Span(joined.pop().start_ms, span.end_ms)
        joined.append(span)
    return joined


def gaps(spans: Sequence[Span]) -> list[Span]:
    """The silences between the spans."""
    return [Span(before.end_ms, after.start_ms) for before, after in pairwise(spans)]


def room_tone(pcm: np.ndarray, name: str) -> np.ndarray:
    """The recording's quietest 300 ms, or soft noise where even those are speech."""
    size = samples(300)
    starts = range(0, max(len(pcm) - size, 1), samples(50))
    quietest = min((pcm[at : at + size] for at in starts), key=level_db)
    if level_db(quietest) > level_db(pcm) - 2 * _LEAST_RANGE_DB:
        return soft_noise(name)
    return quietest


def soft_noise(name: str) -> np.ndarray:
    """300 ms of an empty room."""
    return to_pcm(rng_of(name).normal(0, 10 ** (_TONE_DB / 20), samples(300)))


def lasting(tone: np.ndarray, n: int) -> np.ndarray:
    """n samples of the tone, forwards and backwards in turn, so that no edge clicks."""
    there_and_back = np.concatenate((tone, tone[::-1]))
    return np.tile(there_and_back, -(-n // len(there_and_back)))[:n]


def with_pauses(
    pcm: np.ndarray, pauses: Sequence[Span], lengths_ms: Sequence[float], tone: np.ndarray
) -> tuple[np.ndarray, tuple[Span, ...]]:
    """The clip with pauses of other lengths. Returns the audio and the new pauses."""
    parts, spans, taken = [], [], 0
    n_done = 0
    for pause, length_ms in zip(pauses, lengths_ms, strict=True):
        margin_ms = min(_MARGIN_MS, pause.lasts_ms / 2, length_ms / 2)
        fill = lasting(tone, samples(length_ms - 2 * margin_ms))
        head = pcm[taken : samples(pause.start_ms + margin_ms)]
        parts += [head, fill]
        n_done += len(head) + len(fill)
        end_ms = n_done / SAMPLES_PER_MS + margin_ms
        spans.append(Span(end_ms - length_ms, end_ms))
        taken = samples(pause.end_ms - margin_ms)
    return np.concatenate([*parts, pcm[taken:]]), tuple(spans)


def echo(playing: np.ndarray, db: float, delay_ms: float) -> np.ndarray:
    """What the microphone hears of what the agent plays: later, and weaker by db (negative)."""
    late = np.concatenate((np.zeros(samples(delay_ms), np.int16), playing))[: len(playing)]
    return to_pcm(late / _FULL_SCALE * 10 ** (db / 20))


def in_room(pcm: np.ndarray, direct_db: float, name: str) -> np.ndarray:
    """With reverberation of 200 ms that falls by 60 dB in 280 ms, at the same level.

    direct_db: energy of the direct sound over the reverberation's.
    name: from which the room's reflections are drawn.
    """
    t_s = np.arange(samples(200)) / samples(1000)
    tail = rng_of(name).standard_normal(len(t_s)) * np.exp(-t_s / 0.04)
    tail[0] = 0.0
    tail *= 10 ** (-direct_db / 20) / np.linalg.norm(tail)
    tail[0] = 1.0
    heard = np.convolve(pcm / _FULL_SCALE, tail / np.linalg.norm(tail))[: len(pcm)]
    return to_pcm(heard)


def mixed(*sounds: np.ndarray) -> np.ndarray:
    """The sum, as long as the longest."""
    total = np.zeros(max(map(len, sounds)))
    for sound in sounds:
        total[: len(sound)] += sound / _FULL_SCALE
    return to_pcm(total)


def keyboard(rng: np.random.Generator, n: int) -> np.ndarray:
    """Six key strokes a second, each a press and a softer release of 5 ms of noise."""
    sound = np.zeros(n)
    at = rng.exponential(samples(160))
    while at < n:
        for later_ms, gain in ((0, 1.0), (70, 0.4)):
            start = int(at) + samples(later_ms)
            click = rng.standard_normal(samples(5)) * np.exp(-np.arange(samples(5)) / samples(1))
            room = sound[start : start + len(click)]
            room += gain * click[: len(room)]
        at += rng.exponential(samples(160)) + samples(40)
    return sound


def music(rng: np.random.Generator, n: int) -> np.ndarray:
    """Chords of three notes with five harmonics each, two a second."""
    sound = np.zeros(n)
    for start in range(0, n, samples(500)):
        t = np.arange(min(samples(500), n - start)) / (1000 * SAMPLES_PER_MS)
        root_hz = 220 * 2 ** (rng.integers(0, 12) / 12)
        for ratio in (1, 2 ** (4 / 12), 2 ** (7 / 12)):
            for harmonic in range(1, 6):
                wave = np.sin(2 * np.pi * root_hz * ratio * harmonic * t) / harmonic
                sound[start : start + len(t)] += wave * np.exp(-t / 0.4)
    return sound


def cough(rng: np.random.Generator, n: int) -> np.ndarray:
    """Two bursts of dull noise with a short voiced tail, 350 ms apart."""
    sound = np.zeros(n)
    for start in (0, samples(350)):
        t = np.arange(min(samples(260), max(n - start, 0))) / (1000 * SAMPLES_PER_MS)
        dull = np.convolve(rng.standard_normal(len(t)), np.ones(4) / 4, mode="same")
        pitch_hz = rng.uniform(90, 160)
        tail = 0.3 * np.sign(np.sin(2 * np.pi * pitch_hz * t))
        sound[start : start + len(t)] += dull * np.exp(-t / 0.05) + tail * np.exp(-t / 0.09)
    return sound
