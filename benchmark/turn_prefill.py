"""Time that turn prefill saves at the end of an utterance, by the utterance's length.

    python -m benchmark.turn_prefill --pieces 0,1,2,4,8 --lengths 2,5,10,20 --json out.json

One user at a time speaks turns of these lengths at real-time pace, each in a session of its own.
Every size of piece has a fresh server; 0 is without the policy. The order of lengths is random, and
the same for all. With a recogniser (`--model-path cascade --pieces 0,1`) any other size than 0 is
the policy, because its pieces end in pauses.
"""

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess
from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import RealtimeClient
from sglang_live.client import clip
from sglang_live.clock import MonotonicClock

WORKLOADS = Path(__file__).parent / "workloads"
POLICIES = "urgency+pacing+truncate+startup-delay+retention+next-use+preload"
START_TIMEOUT_S = 600.0
# Longer pauses, as between sentences, would end the turn.
_LONGEST_PAUSE_S = 0.2
_FRAME = round(clip.SAMPLE_RATE_HZ * clip.FRAME_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """pieces, lengths: seconds, separated by commas. max_tokens: of a response; 0: any number."""

    pieces: str = "0,1,2,4,8"
    lengths: str = "2,5,10,20"
    repeats: int = 5
    max_tokens: int = 0
    model_path: str = "demo-random"
    clips: str = str(WORKLOADS / "clips")
    seed: int = 1
    json: str = ""


def fluent(pcm: bytes) -> np.ndarray:
    """[n] int16: the audio without its long pauses."""
    samples = np.frombuffer(pcm, "<i2")
    frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
    level = np.sqrt(np.mean(np.square(frames.astype(np.float32)), axis=1))
    is_quiet = level < level.max() * 10 ** (-clip.SPEECH_RANGE_DB / 20)
    quiet_for, kept = 0, []
    for frame, quiet in zip(frames, is_quiet, strict=True):
        quiet_for = quiet_for + 1 if quiet else 0
        if quiet_for * clip.FRAME_S <= _LONGEST_PAUSE_S:
            kept.append(frame)
    return np.concatenate(kept)


async def measure(
    url: str, model: str, turns: list[tuple[float, bytes]], max_tokens: int
) -> list[dict]:
    found = []
    for length_s, pcm in turns:
        options = LoadOptions(url=url, model=model)
        async with RealtimeClient(options, MonotonicClock()) as client:
            if max_tokens:
                await client.limit_responses(max_tokens)
            record = await client.speak(pcm)
        found.append(
            {
                "length_s": length_s,
                "status": record.status,
                "early_replies": record.early_replies,
                "ttfp_ms": record.ttfp_ms,
                "ttfp_after_detection_ms": record.ttfp_after_detection_ms,
            }
        )
    return found


def run(options: Options) -> list[dict]:
    rng = random.Random(options.seed)
    speech = np.concatenate(
        [fluent(clip.load_pcm(path)) for path in sorted(Path(options.clips).glob("*.flac"))]
    )
    lengths = [float(text) for text in options.lengths.split(",")]
    turns = []
    for _ in range(options.repeats):
        for length_s in rng.sample(lengths, len(lengths)):
            n = round(length_s * clip.SAMPLE_RATE_HZ)
            at = rng.randrange(len(speech) - n)
            turns.append((length_s, speech[at : at + n].tobytes()))
    rows = []
    for piece_s in [float(text) for text in options.pieces.split(",")]:
        policies = f"{POLICIES}+turn-prefill" if piece_s else POLICIES
        args = (f"--turn-prefill-s={piece_s:g}",) if piece_s else ()
        with ServerProcess(options.model_path, policies, args, START_TIMEOUT_S) as server:
            # The first turn of a server includes its warm-up.
            warm_up = turns[:1]
            model = Path(options.model_path).name
            measuring = measure(server.url, model, [*warm_up, *turns], options.max_tokens)
            found = asyncio.run(measuring)[len(warm_up) :]
        rows += [{"piece_s": piece_s, **turn} for turn in found]
        report(rows)
    return rows


def report(rows: list[dict]) -> None:
    lengths = sorted({row["length_s"] for row in rows})
    print("TTFP after the end of the turn, median of n, ms")
    print("piece s  " + "".join(f"{length:>10g} s" for length in lengths))
    for piece_s in sorted({row["piece_s"] for row in rows}):
        cells = []
        for length in lengths:
            values = [
                row["ttfp_after_detection_ms"]
                for row in rows
                if (row["piece_s"], row["length_s"]) == (piece_s, length)
                and row["ttfp_after_detection_ms"] is not None
                and not row["early_replies"]
            ]
            cells.append(f"{np.median(values):>8.0f}/{len(values)}" if values else f"{'n/a':>10}")
        print(f"{piece_s or 'off':>7}  " + "  ".join(cells), flush=True)


def main() -> None:
    options = read_options(Options(), __doc__)
    rows = run(options)
    if options.json:
        document = {
            "benchmark": "turn_prefill",
            **facts(),
            "config": config_of(options),
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
