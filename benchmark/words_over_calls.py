"""What a network's losses do to what the server hears: transcripts over WebRTC, by loss.

    python -m sglang_live.launch_server --model-path demo &
    python -m benchmark.words_over_calls --url http://127.0.0.1:30000 --json out.json

Each text is said over a call in a transcription session. Its transcript is compared with the text,
and with that of the first arm.
"""

import argparse
import asyncio
import json
import random
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmark.anything_said import Speaker, speaker_of
from benchmark.call_users import STARTED, Network, Script, User, Utterance, call, encoded
from benchmark.load.provenance import facts
from benchmark.word_errors import word_errors, words_of
from lab.load_client.utterance import frames_before_speech
from sglang_live.client import clip

COMPLETED = "conversation.item.input_audio_transcription.completed"
FORM = {"type": "transcription"}
# What the demo model knows.
TEXTS = (
    "What is the capital of France?",
    "Tell me a joke.",
    "What is the weather like?",
    "How are you today?",
    "Who are you?",
    "Where are you from?",
    "What can you do?",
    "Tell me a story.",
    "What time is it?",
    "Count to fifty.",
)
_BEFORE_S, _PAUSE_S = 1.0, 3.0
_LAST_S = 30.0
_PADDING_S = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """
    Attributes:
        heard: transcripts, one a text and repeat; "": none came.
        n_equal: of them, as in the first arm.
        words, errors: of the texts, and word errors.
    """

    loss: float
    jitter_ms: float
    heard: list[str]
    n_equal: int
    words: int
    errors: int


def script_of(sounds: list[bytes]) -> Script:
    def silence(seconds: float) -> list[bytes]:
        return [bytes(clip.FRAME_BYTES)] * round(seconds / clip.FRAME_S)

    frames, said = silence(_BEFORE_S), []
    for pcm in sounds:
        begin, end = (len(frames) + n for n in (frames_before_speech(pcm), clip.speech_frames(pcm)))
        said.append(Utterance(begin, end, False))
        frames += clip.frames(pcm) + silence(_PAUSE_S)
    return Script((*frames, *silence(_LAST_S)), tuple(said))


async def heard_over(url: str, script: Script, network: Network, seed: int) -> list[str]:
    """The transcript of each utterance; "" where none came. One that was cut in two is joined."""
    began_ms: dict[str, int] = {}
    texts: dict[str, str] = {}
    user = User(script, 0)

    def took(text: str) -> None:
        event = orjson.loads(text)
        if event["type"] == STARTED:
            began_ms[event["item_id"]] = event["audio_start_ms"]
        elif event["type"] == COMPLETED:
            texts[event["item_id"]] = event["transcript"]

    packets = encoded(script, network.loss)
    running = asyncio.create_task(
        call(user, packets, url, network, random.Random(seed), form=FORM, took=took)
    )
    try:
        while user.n_sent < len(script.frames):
            is_over = user.n_sent > script.utterances[-1].end + _PAUSE_S / clip.FRAME_S
            if is_over and set(texts) >= set(began_ms):
                break
            done, _ = await asyncio.wait({running}, timeout=0.1)
            if done:
                running.result()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    found = [""] * len(script.utterances)
    begins_ms = [1e3 * (clip.FRAME_S * one.begin - _PADDING_S) for one in script.utterances]
    for item_id in sorted(texts, key=began_ms.__getitem__):
        place = sum(begin <= began_ms[item_id] for begin in begins_ms) - 1
        found[max(0, place)] += f" {texts[item_id]}"
    return [text.strip() for text in found]


async def measure(url: str, speaker: Speaker, networks: list[Network], repeats: int) -> list[Arm]:
    sounds = [speaker(text) for text in TEXTS]
    arms: list[Arm] = []
    for network in networks:
        heard = []
        for seed in range(repeats):
            heard += await heard_over(url, script_of(sounds), network, seed)
        first = arms[0].heard if arms else heard
        said = TEXTS * repeats
        arms.append(
            Arm(
                loss=network.loss,
                jitter_ms=1e3 * network.jitter_s,
                heard=heard,
                n_equal=sum(a == b for a, b in zip(heard, first, strict=True)),
                words=sum(len(words_of(text)) for text in said),
                errors=sum(word_errors(a, b) for a, b in zip(said, heard, strict=True)),
            )
        )
        print(line(arms[-1]), flush=True)
    return arms


def line(arm: Arm) -> str:
    return (
        f"loss {arm.loss:.0%}, jitter {arm.jitter_ms:.0f} ms: {arm.n_equal} of {len(arm.heard)} "
        f"transcripts as in the first arm, {arm.errors / arm.words:.1%} word errors"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.words_over_calls", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--url", required=True, help="of a running server")
    parser.add_argument("--losses", default="0,0.02,0.1")
    parser.add_argument("--jitter-ms", type=float, default=100.0, help="with losses")
    parser.add_argument(
        "--speaker", default="espeak-ng:en-us", help="as of benchmark.anything_said"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    losses = [float(text) for text in args.losses.split(",")]
    networks = [Network(loss, args.jitter_ms / 1e3 if loss else 0.0) for loss in losses]
    arms = asyncio.run(measure(args.url, speaker_of(args.speaker), networks, args.repeats))
    if args.json is not None:
        document: dict[str, Any] = {
            "benchmark": "words_over_calls",
            **facts(),
            "speaker": args.speaker,
            "arms": [asdict(arm) for arm in arms],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
