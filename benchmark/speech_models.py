"""Cost and word errors of a cascade's recogniser and voice, with the published weights.

    python -m benchmark.speech_models recogniser --manifest audio/manifest.jsonl
    python -m benchmark.speech_models voice --questions mt_bench_questions.jsonl ...

`recogniser` hears the recordings of one speaker whose text is known. `voice` reads first sentences
of questions aloud, which the recogniser hears; those with digits or symbols are left out. Each
runs one model at a time on `--threads` threads, so that memory and time are its own.
"""

import argparse
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import soundfile as sf
import soxr

from benchmark.load.provenance import facts
from benchmark.word_errors import word_errors, words_of
from sglang_live.core import INPUT_RATE_HZ
from sglang_live.models.hibari import HibariVoice
from sglang_live.models.moonshine import MoonshineRecogniser
from sglang_live.models.packages import HIBARI, MOONSHINE, fetch
from sglang_live.models.speech import Pcm

_PLAIN_SENTENCE = re.compile(r"[A-Z][A-Za-z' ,-]+[.?!]")
_MIN_WORDS = 5

T = TypeVar("T")


@dataclass
class Cost:
    """Time and memory of one model in this process."""

    load_s: float
    load_mb: float
    run_s: float = 0.0
    audio_s: float = 0.0
    n_runs: int = 0
    slowest_s: float = 0.0

    def timed(self, call: Callable[[], T]) -> T:
        began_s = time.perf_counter()
        result = call()
        took_s = time.perf_counter() - began_s
        self.run_s += took_s
        self.slowest_s = max(self.slowest_s, took_s)
        self.n_runs += 1
        return result

    def figures(self, mb_before: float) -> dict[str, float]:
        return {
            "load_s": round(self.load_s, 2),
            "memory_after_load_mb": round(self.load_mb),
            "memory_after_runs_mb": round(resident_mb() - mb_before),
            "runs": self.n_runs,
            "audio_s": round(self.audio_s, 1),
            "rtf": round(self.run_s / self.audio_s, 4),
            "slowest_run_s": round(self.slowest_s, 3),
        }


def resident_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def loaded(load: Callable[[], T]) -> tuple[T, Cost]:
    before_mb, began_s = resident_mb(), time.perf_counter()
    model = load()
    return model, Cost(time.perf_counter() - began_s, resident_mb() - before_mb)


def recordings(manifest: Path) -> Iterator[tuple[str, str, Pcm]]:
    """Name, text and sound of each recording of one speaker with a text."""
    for line in manifest.read_text("utf-8").splitlines():
        entry = json.loads(line)
        if entry["kind"] == "speech" and entry["transcript"]:
            pcm, rate_hz = sf.read(manifest.parent / Path(entry["file"]).name, dtype="int16")
            assert rate_hz == INPUT_RATE_HZ, entry["file"]
            yield entry["file"], entry["transcript"], pcm


def plain_sentences(files: list[Path], n: int) -> list[str]:
    """First sentences of questions, of letters only, alternately from each file."""
    found = [
        [
            match[0]
            for line in path.read_text("utf-8").splitlines()
            if (match := _PLAIN_SENTENCE.match(json.loads(line)["turns"][0]))
            and len(match[0].split()) >= _MIN_WORDS
        ]
        for path in files
    ]
    alternating = itertools.chain.from_iterable(itertools.zip_longest(*found))
    return [sentence for sentence in alternating if sentence][:n]


def error_figures(pairs: list[tuple[str, str]]) -> dict[str, object]:
    """pairs: what was said and what was heard."""
    errors = [word_errors(said, heard) for said, heard in pairs]
    n_words = sum(len(words_of(said)) for said, _ in pairs)
    return {
        "texts": len(pairs),
        "words": n_words,
        "word_errors": sum(errors),
        "word_error_rate": round(sum(errors) / n_words, 4),
        "texts_with_errors": [
            {"said": said, "heard": heard, "errors": n}
            for (said, heard), n in zip(pairs, errors, strict=True)
            if n
        ],
    }


def measure_recogniser(manifest: Path, n_threads: int) -> dict[str, object]:
    directory = fetch(MOONSHINE, report=print)
    before_mb = resident_mb()
    model, cost = loaded(lambda: MoonshineRecogniser.load(directory, n_threads=n_threads))
    model.transcribe(np.ones(INPUT_RATE_HZ, np.int16))
    pairs = []
    for _, said, pcm in recordings(manifest):
        pairs.append((said, cost.timed(lambda pcm=pcm: model.transcribe(pcm))))
        cost.audio_s += len(pcm) / INPUT_RATE_HZ
    return {**cost.figures(before_mb), **error_figures(pairs)}


def measure_voice(files: list[Path], n_sentences: int, n_threads: int) -> dict[str, object]:
    sentences = plain_sentences(files, n_sentences)
    directory = fetch(HIBARI, report=print)
    before_mb = resident_mb()
    model, cost = loaded(lambda: HibariVoice.load(directory, n_threads=n_threads))
    voice = model.voices[0]
    model.synthesise("Warm up.", voice)
    spoken = []
    for text in sentences:
        speech = cost.timed(lambda text=text: model.synthesise(text, voice))
        cost.audio_s += len(speech.pcm) / model.sample_rate_hz
        spoken.append(speech)
    figures = cost.figures(before_mb)
    # Loaded after the voice was measured.
    recogniser = MoonshineRecogniser.load(fetch(MOONSHINE, report=print), n_threads=n_threads)
    pairs = []
    for text, speech in zip(sentences, spoken, strict=True):
        wave = soxr.resample(speech.pcm, model.sample_rate_hz, INPUT_RATE_HZ)
        pairs.append((text, recogniser.transcribe(wave)))
    return {**figures, **error_figures(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("recogniser", "voice"))
    parser.add_argument("--manifest", type=Path, help="JSON lines: file, kind, transcript")
    parser.add_argument("--questions", type=Path, nargs="+", default=[], help="JSON lines: turns")
    parser.add_argument("--sentences", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.model == "recogniser":
        if args.manifest is None:
            parser.error("recogniser needs --manifest")
        figures = measure_recogniser(args.manifest, args.threads)
    else:
        if not args.questions:
            parser.error("voice needs --questions")
        figures = measure_voice(args.questions, args.sentences, args.threads)
    document = {
        "benchmark": "speech_models",
        **facts(),
        "config": {"model": args.model, "threads": args.threads},
        **figures,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if args.json:
        args.json.write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main()
