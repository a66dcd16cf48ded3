"""Examination of the demo model through a running server.

    python -m training.demo.exam [--model-path PATH] [--people DIR] [--json FILE]

Four measurements. Does an independent recogniser find the right sentence in the server's audio? Are
questions in held-out synthetic voices, with noise at 15 dB, answered right? Do recordings of people
who talk of other things get the answer UNKNOWN? Does silence or noise start a turn? A wrong answer
that is not UNKNOWN is `confident`.
"""

import argparse
import asyncio
import base64
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import soundfile
import soxr

from benchmark.load.provenance import facts
from benchmark.load.server import ServerProcess
from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import RealtimeClient
from sglang_live.client.clip import SAMPLE_RATE_HZ
from sglang_live.clock import MonotonicClock
from sglang_live.models.demo.location import DEMO
from training.demo import world
from training.demo.acoustics import Room, background_noise
from training.demo.judge import Judge
from training.demo.unknown_sentences import unknown_sentences
from training.demo.voices import ANSWERING, QUESTION_RATE_HZ, HeldOutCast, require_programs

SEED = 20260707
START_TIMEOUT_S = 600.0
SNR_DB = 15.0
N_DISTRACTORS = 200
TURNS_PER_SESSION = 4
QUIET_S = 20.0
# Limits the audio where only the text of an answer is judged.
_MAX_TOKENS = 400
_USERS_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    answers: int = 200
    questions: int = 200
    spoken_live: int = 24
    quiet_rooms: int = 12


class Examiner:
    def __init__(self, url: str, model: str, people: list[Path], extent: Extent):
        self._url, self._model = url, model
        self._people, self._extent = people, extent

    async def examine(self) -> dict:
        return {
            "understood": await self.understood(),
            "questions_as_items": await self.questions(self._extent.questions, live=False),
            "questions_by_microphone": await self.questions(self._extent.spoken_live, live=True),
            "people": await self.people(),
            "quiet": await self.quiet(),
        }

    async def understood(self) -> dict:
        """Typed questions; the sound of their answers is judged."""
        judge = Judge([*world.answers(), *_distractors(SEED, N_DISTRACTORS)])
        rng = random.Random(SEED)
        wrong, n, heard, heard_original, confident, audio_s, took_s = [], 0, 0, 0, 0, 0.0, 0.0
        while n < self._extent.answers:
            user = world.User(rng, unknown_sentences(random.Random(rng.random())))
            async with self._session() as client:
                for _ in range(TURNS_PER_SESSION):
                    exchange = user.next()
                    began_s = time.monotonic()
                    record = await client.ask(exchange.question.capitalize() + "?")
                    took_s += time.monotonic() - began_s
                    audio_s += record.audio_s
                    said = judge.hear(_samples(record.reply_pcm), SAMPLE_RATE_HZ)
                    written = record.transcript.strip()
                    original = ANSWERING.say(exchange.answer, SAMPLE_RATE_HZ)
                    heard_original += judge.hear(original, SAMPLE_RATE_HZ) == exchange.answer
                    n += 1
                    heard += said == exchange.answer
                    confident += written not in (exchange.answer, world.UNKNOWN)
                    if said != exchange.answer:
                        wrong.append([exchange.question, exchange.answer, written, said])
        return {
            "n": n,
            "right": heard,
            "right_of_the_synthesiser": heard_original,
            "confidently_wrong": confident,
            "ways": len(judge.sentences),
            "audio_s": audio_s,
            "s_per_audio_s": took_s / audio_s,
            "wrong": wrong,
        }

    async def questions(self, n: int, *, live: bool) -> dict:
        """Questions in held-out voices.

        live: streamed as from a microphone, at the pace of speech; otherwise sent as items.
        """
        rng = random.Random(SEED + live)
        cast, noise = HeldOutCast(rng), np.random.default_rng(SEED + live)
        kinds = world.User(rng, unknown_sentences(random.Random(SEED + 2 + live)))
        exchanges = []
        while len(exchanges) < n:
            kinds.memory = world.Memory()  # each question has a session of its own
            exchanges.append(kinds.next())
        clips = [
            Room.random(noise, SNR_DB).apply(cast.next().say(e.question, QUESTION_RATE_HZ), noise)
            for e in exchanges
        ]
        answers = await self._all([self._answer(clip, live) for clip in clips])
        return _marks(exchanges, answers)

    async def people(self) -> dict:
        clips = [_loaded(path) for path in self._people]
        answers = await self._all([self._answer(clip, live=False) for clip in clips])
        others = [
            [path.name, answer]
            for path, answer in zip(self._people, answers, strict=True)
            if answer != world.UNKNOWN
        ]
        return {"n": len(clips), "not_understood": len(clips) - len(others), "others": others}

    async def quiet(self) -> dict:
        """Counts the turns that digital silence and rooms without speech start."""
        rng = np.random.default_rng(SEED)
        n = self._extent.quiet_rooms
        rooms = [np.zeros(round(QUIET_S * QUESTION_RATE_HZ), np.float32)]
        rooms += [background_noise(rng, QUIET_S) for _ in range(n - 1)]
        answers = await self._all([self._listen(room) for room in rooms])
        return {"n": n, "seconds": n * QUIET_S, "turns": sum(answers)}

    async def _answer(self, clip: np.ndarray, live: bool) -> str:
        async with self._session(push_to_talk=not live) as client:
            if live:
                record = await client.speak(_pcm(clip))
                return record.transcript.strip()
            audio = base64.b64encode(_pcm(clip)).decode()
            item = {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_audio", "audio": audio}],
            }
            create = json.dumps({"type": "conversation.item.create", "item": item})
            record = await client.post(create, _MAX_TOKENS)
            return record.transcript.strip()

    async def _listen(self, room: np.ndarray) -> int:
        turns = 0

        def count(event: dict) -> None:
            nonlocal turns
            turns += event["type"] == "input_audio_buffer.speech_started"

        async with self._session(on_event=count) as client:
            await client.feed_microphone(_pcm(room))
        return turns

    @asynccontextmanager
    async def _session(
        self, *, push_to_talk: bool = True, on_event: Callable[[dict], None] | None = None
    ):
        options = LoadOptions(url=self._url, model=self._model, push_to_talk=push_to_talk)
        async with RealtimeClient(options, MonotonicClock(), on_event) as client:
            yield client

    async def _all(self, sessions: list[Awaitable]) -> list:
        limit = asyncio.Semaphore(_USERS_AT_ONCE)

        async def limited(session: Awaitable):
            async with limit:
                return await session

        return await asyncio.gather(*map(limited, sessions))


def _marks(exchanges: list[world.Exchange], answers: list[str]) -> dict:
    pairs = list(zip(exchanges, answers, strict=True))
    wrong = [[e.question, e.answer, a] for e, a in pairs if a != e.answer]
    return {
        "n": len(pairs),
        "right": len(pairs) - len(wrong),
        "confidently_wrong": sum(a != world.UNKNOWN for _, _, a in wrong),
        "wrong": wrong,
    }


def _distractors(seed: int, n: int) -> Iterator[str]:
    return islice(unknown_sentences(random.Random(seed)), n)


def _samples(pcm: bytes) -> np.ndarray:
    return np.frombuffer(pcm, "<i2").astype(np.float32) / 32768


def _pcm(sound: np.ndarray) -> bytes:
    """The session's PCM of 16 kHz float samples."""
    sound = soxr.resample(sound, QUESTION_RATE_HZ, SAMPLE_RATE_HZ)
    return (np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()


def _loaded(path: Path) -> np.ndarray:
    sound, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    return soxr.resample(sound.mean(axis=1), rate_hz, QUESTION_RATE_HZ)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default=DEMO)
    parser.add_argument("--people", type=Path, nargs="*", default=[], help="folders of recordings")
    parser.add_argument("--json", type=Path)
    for name, n in (("answers", 200), ("questions", 200), ("spoken-live", 24), ("quiet-rooms", 12)):
        parser.add_argument(f"--{name}", type=int, default=n)
    args = parser.parse_args()
    require_programs()
    people = sorted(path for folder in args.people for path in folder.glob("*.flac"))
    extent = Extent(
        answers=args.answers,
        questions=args.questions,
        spoken_live=args.spoken_live,
        quiet_rooms=args.quiet_rooms,
    )
    with ServerProcess(args.model_path, "all", (), START_TIMEOUT_S) as server:
        model = Path(args.model_path).name
        found = asyncio.run(Examiner(server.url, model, people, extent).examine())
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps({**facts(), **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
