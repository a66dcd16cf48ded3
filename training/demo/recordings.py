"""Synthesised speech for training, cached: answers, general speech, questions in many voices.

Sound on disk is PCM16, concatenated, with an index: thousands of small files are slow to write and
to read.
"""

import json
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from training.demo import world
from training.demo.unknown_sentences import unknown_sentences
from training.demo.voices import (
    ANSWER_RATE_HZ,
    ANSWERING,
    QUESTION_RATE_HZ,
    Cast,
    HeldOutCast,
    Voice,
)

_AT_ONCE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Utterance:
    """A spoken text.

    sound: float32 in [-1, 1].
    """

    text: str
    sound: np.ndarray


class RecordingCache:
    """Recordings in a folder: `NAME.pcm` holds the samples, `NAME.json` texts and lengths."""

    def __init__(self, directory: Path):
        self._directory = directory

    def cached(self, name: str, make: Iterator[Utterance]) -> list[Utterance]:
        """The recordings stored under this name, or those of `make`, which are then stored."""
        index, samples = (self._directory / f"{name}{end}" for end in (".json", ".pcm"))
        if not index.exists():
            self._directory.mkdir(parents=True, exist_ok=True)
            entries = []
            with samples.open("wb") as file:
                for said in make:
                    pcm = (np.clip(said.sound, -1, 1) * 32767).astype("<i2")
                    file.write(pcm.tobytes())
                    entries.append([said.text, len(pcm)])
            index.write_text(json.dumps(entries), "utf-8")
        pcm = np.fromfile(samples, "<i2")
        found, at = [], 0
        for text, n in json.loads(index.read_text("utf-8")):
            found.append(Utterance(text, pcm[at : at + n].astype(np.float32) / 32767))
            at += n
        return found


def answers() -> Iterator[Utterance]:
    return _synthesise(((a, ANSWERING) for a in world.answers()), ANSWER_RATE_HZ)


def general_speech(n: int, seed: int) -> Iterator[Utterance]:
    """Sentences in the answering voice: the vocoder trains on more than the answers."""
    sentences = islice(unknown_sentences(random.Random(seed)), n)
    return _synthesise(((s, ANSWERING) for s in sentences), ANSWER_RATE_HZ)


def spoken_questions(
    n_voices: int, n_unknown: int, cast: Cast | HeldOutCast
) -> Iterator[Utterance]:
    """Every question in n_voices random voices, and n_unknown sentences in one voice each."""
    rng = cast.rng
    texts = [q for q in world.questions() for _ in range(n_voices)]
    texts += islice(unknown_sentences(rng), n_unknown)
    return _synthesise([(text, cast.next()) for text in texts], QUESTION_RATE_HZ)


def _synthesise(lines: Iterable[tuple[str, Voice]], rate_hz: int) -> Iterator[Utterance]:
    def say(line: tuple[str, Voice]) -> Utterance:
        text, voice = line
        return Utterance(text, voice.say(text, rate_hz))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(say, lines)
