"""Full-Duplex-Bench 1.0: who speaks in the user's pauses, after his turns and interruptions.

    python -m benchmark.third_party.run_full_duplex_bench --url http://127.0.0.1:30000 --data DIR

DIR has the benchmark's folders as published: `<task>/<id>/` with `input.wav` and its annotation.
Takeover and latency are by its definitions, but from the sound that was played in place of its
recogniser's words; its judge of the content is left out.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.load.provenance import facts
from benchmark.third_party import realtime
from sglang_live.client import clip

ANNOTATIONS = ("pause.json", "turn_taking.json", "interrupt.json")
# Shorter speech takes no turn (its `turn_duration_threshold`).
TURN_S = 1.0
_AFTER_S = 8.0
_LEVEL = 200.0  # RMS; what is softer is no speech


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """
    Attributes:
        takes_turn: the agent speaks for a second within the recording; after a turn or an
            interruption, at any time.
        latency_s: from the end of the turn or of the interruption to its first sound; None: it does
            not take the turn, or the task has no latency.
    """

    task: str
    name: str
    takes_turn: bool
    latency_s: float | None
    transcripts: list[str]


class Player:
    """The agent's voice at the pace of time. frames: those that were played."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.transcripts: list[str] = []
        self._waiting = bytearray()

    def take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case realtime.DELTA:
                self._waiting += realtime.sound_of(event)
            case realtime.STARTED:
                self._waiting.clear()
            case realtime.HEARD:
                self.transcripts.append(event["transcript"])

    def tick(self) -> None:
        frame = bytes(self._waiting[: clip.FRAME_BYTES])
        del self._waiting[: clip.FRAME_BYTES]
        self.frames.append(frame.ljust(clip.FRAME_BYTES, b"\0"))

    def speaks(self) -> np.ndarray:
        """For each frame whether it has speech."""
        samples = np.frombuffer(b"".join(self.frames), "<i2").reshape(len(self.frames), -1)
        return np.sqrt(np.square(samples.astype(np.float32)).mean(1)) > _LEVEL


async def converse(url: str, pcm: bytes) -> Player:
    player = Player()
    session = realtime.Session(url, player.take)
    await session.open()
    silence = [bytes(clip.FRAME_BYTES)] * round(_AFTER_S / clip.FRAME_S)
    begun_s = time.monotonic()
    try:
        for n, frame in enumerate((*clip.frames(pcm), *silence)):
            await asyncio.sleep(max(0.0, begun_s + clip.FRAME_S * n - time.monotonic()))
            await session.append(frame)
            player.tick()
    finally:
        await session.close()
    return player


async def row_of(url: str, annotation: Path) -> Row:
    pcm = clip.load_pcm(annotation.with_name("input.wav"))
    player = await converse(url, pcm)
    times = json.loads(annotation.read_text("utf-8"))[0]["timestamp"]
    speaks, latency_s = player.speaks(), None
    match annotation.name:
        case "pause.json":
            # The user goes on: what is spoken before the end of the recording talks over him.
            takes_turn = _lasts(speaks[: len(clip.frames(pcm))])
        case name:
            end_s = times[0] if name == "turn_taking.json" else times[1]
            later = speaks[round(end_s / clip.FRAME_S) :]
            takes_turn = _lasts(later)
            if takes_turn:
                latency_s = round(clip.FRAME_S * int(later.argmax()), 2)
    return Row(
        task=annotation.parent.parent.name,
        name=annotation.parent.name,
        takes_turn=takes_turn,
        latency_s=latency_s,
        transcripts=player.transcripts,
    )


def _lasts(speaks: np.ndarray) -> bool:
    """From the first speech to the last."""
    at = np.flatnonzero(speaks)
    return bool(len(at)) and clip.FRAME_S * float(at[-1] - at[0]) >= TURN_S


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="of a running server: http://host:port")
    parser.add_argument("--data", type=Path, required=True, help="the benchmark's folders")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    rows = []
    for path in sorted(path for name in ANNOTATIONS for path in args.data.rglob(name)):
        rows.append(asyncio.run(row_of(args.url, path)))
        print(rows[-1], flush=True)
    if args.json is not None:
        document = {
            "benchmark": "full_duplex_bench",
            **facts(),
            "suite": "Full-Duplex-Bench 1.0",
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
