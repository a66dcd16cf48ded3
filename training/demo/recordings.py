"""What is synthesised for training, and kept: answers, general speech, questions of many voices.

Sound on disk is PCM16, one array after the other with an index, because thousands of small files
are slow to make and to read.
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
from training.demo.strangers import strangers
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
class Said:
    """text as it was spoken, and its sound: float32 in [-1, 1]."""

    text: str
    sound: np.ndarray


class Shelf:
    """Recordings in a folder: `NAME.pcm` holds the samples, `NAME.json` texts and lengths."""

    def __init__(self, directory: Path):
        self._directory = directory

    def kept(self, name: str, make: Iterator[Said]) -> list[Said]:
        """What lies there under this name, or what `make` yields, laid there."""
        index, samples = (self._directory / f"{name}{end}" for end in (".json", ".pcm"))
        if not index.exists():
            self._directory.mkdir(parents=True, exist_ok=True)
            entries = []
            with samples.open("wb") as file:
                for said in make:
                    pcm = (np.clip(said.sound, -1, 1) * 32767).astype("<i2")
                    file.write(pcm.tobytes())
                    entries.append([said.text, len(pcm)])
            index.write_text(json.dumps(entries))
        pcm = np.fromfile(samples, "<i2")
        found, at = [], 0
        for text, n in json.loads(index.read_text()):
            found.append(Said(text, pcm[at : at + n].astype(np.float32) / 32767))
            at += n
        return found


def answers() -> Iterator[Said]:
    return _all_said(((a, ANSWERING) for a in world.answers()), ANSWER_RATE_HZ)


def general_speech(n: int, seed: int) -> Iterator[Said]:
    """What the vocoder hears besides the answers, so that it knows more of its voice."""
    sentences = islice(strangers(random.Random(seed)), n)
    return _all_said(((s, ANSWERING) for s in sentences), ANSWER_RATE_HZ)


def asked(n_voices: int, n_strangers: int, cast: Cast | HeldOutCast) -> Iterator[Said]:
    """Every question in so many random voices, and strangers in one each."""
    rng = cast.rng
    texts = [q for q in world.questions() for _ in range(n_voices)]
    texts += islice(strangers(rng), n_strangers)
    return _all_said([(text, cast.next()) for text in texts], QUESTION_RATE_HZ)


def _all_said(lines: Iterable[tuple[str, Voice]], rate_hz: int) -> Iterator[Said]:
    def say(line: tuple[str, Voice]) -> Said:
        text, voice = line
        return Said(text, voice.say(text, rate_hz))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(say, lines)
