"""From the end of a user's speech to the first sound of the response, with and without speculation.

    python -m benchmark.first_sound --model-path demo --json out.json
    python -m benchmark.first_sound --model-path cascade --arms="--speculate-ms=off;"

Each arm is a server with these flags, none for the defaults; all run at the same time, and take
turns: one user speaks a recording at real-time pace to each, with its own pauses, in a session of
its own. TTFP counts from the end of speech in the recording. Turns that some arm answers before the
user has finished are left out of the table, and counted.
"""

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess
from benchmark.turn_cost import mean_marks
from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import RealtimeClient
from lab.load_client.utterance import Utterance
from sglang_live.client import clip
from sglang_live.clock import MonotonicClock

WORKLOADS = Path(__file__).parent / "workloads"
START_TIMEOUT_S = 600.0
SERIES = ("sglang_live_gateway_speculat", "sglang_live_turn_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """
    arms: flags of each server, `;` between arms.
    detections: settings of turn detection that each arm is asked with, `;` between them.
    max_tokens: of a response. most_s: longer recordings are left out.
    """

    model_path: str = "demo"
    arms: str = "--speculate-ms=off;"
    detections: str = '{"type": "server_vad"}'
    clips: str = str(WORKLOADS / "turns")
    pattern: str = "sp_*.flac"
    repeats: int = 1
    max_tokens: int = 16
    most_s: float = 16.0
    seed: int = 1
    json: str = ""


async def one_turn(
    url: str, model: str, speech: Utterance, detection: dict, max_tokens: int
) -> dict:
    options = LoadOptions(url=url, model=model, turn_detection=detection)
    async with RealtimeClient(options, MonotonicClock()) as client:
        await client.limit_responses(max_tokens)
        record = (await client.take_turn(speech)).record()
        return {
            "status": record.status,
            "early_replies": record.early_replies,
            "end_of_turn_ms": record.end_of_turn_ms,
            "ttfp_ms": record.ttfp_ms,
            "gaps_over_100ms": record.gaps_over_100ms,
            "transcript": record.transcript,
        }


async def speak_to_all(options: Options, servers: list[ServerProcess]) -> list[dict]:
    paths = sorted(Path(options.clips).glob(options.pattern))
    recordings = [(path.stem, clip.load_pcm(path)) for path in paths]
    recordings = [(n, pcm) for n, pcm in recordings if clip.duration_s(pcm) <= options.most_s]
    model, rng = Path(options.model_path).name, random.Random(options.seed)
    rows: list[dict] = []
    # The first turn of a server includes its warm-up.
    turns = [(-1, recordings[0])]
    for repeat in range(options.repeats):
        turns += [(repeat, found) for found in rng.sample(recordings, len(recordings))]
    for number, (repeat, (name, pcm)) in enumerate(turns):
        speech = Utterance.of(pcm)
        for detection in options.detections.split(";"):
            arms = list(enumerate(servers))
            for arm, server in arms if number % 2 else reversed(arms):
                asked = json.loads(detection)
                row = await one_turn(server.url, model, speech, asked, options.max_tokens)
                place = {"arm": arm, "detection": detection, "repeat": repeat, "clip": name}
                if repeat >= 0:
                    rows.append({**place, **row})
    return rows


def comparable(rows: list[dict], n_arms: int) -> list[list[dict]]:
    """Rows of each arm, of the turns that all arms answered once, after the user had finished."""
    turns: dict[tuple, list[dict]] = {}
    for row in rows:
        if not row["early_replies"] and row["ttfp_ms"] is not None and row["ttfp_ms"] > 0:
            turns.setdefault((row["repeat"], row["clip"]), []).append(row)
    whole = [sorted(found, key=lambda r: r["arm"]) for found in turns.values()]
    by_arm = [list(arm) for arm in zip(*(w for w in whole if len(w) == n_arms), strict=True)]
    return by_arm or [[] for _ in range(n_arms)]


def report(options: Options, rows: list[dict]) -> list[dict]:
    arms, table = options.arms.split(";"), []
    for detection in options.detections.split(";"):
        asked = [row for row in rows if row["detection"] == detection]
        for flags, found in zip(arms, comparable(asked, len(arms)), strict=True):
            ttfp, detected, after = (
                [measured(row) for row in found]
                for measured in (
                    lambda row: row["ttfp_ms"],
                    lambda row: row["end_of_turn_ms"],
                    lambda row: row["ttfp_ms"] - row["end_of_turn_ms"],
                )
            )
            table.append(
                {
                    "detection": detection,
                    "flags": flags or "defaults",
                    "turns": len(found),
                    "left_out": len(asked) // len(arms) - len(found),
                    **_spread("ttfp", ttfp),
                    **_spread("detected", detected),
                    **_spread("after_detection", after),
                }
            )
            print("  ".join(f"{k}={_short(v)}" for k, v in table[-1].items()))
    return table


def _spread(name: str, values_ms: list[float]) -> dict:
    if not values_ms:
        return {}
    p50, p90 = np.percentile(values_ms, [50, 90])
    return {f"{name}_p50_ms": float(p50), f"{name}_p90_ms": float(p90)}


def _short(value: object) -> object:
    return f"{value:.0f}" if isinstance(value, float) else value


def counted(metrics: str) -> dict:
    counts: dict[str, float] = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith(SERIES) and "_created" not in name:
            counts[name.removeprefix("sglang_live_")] = float(value)
    return {"counts": counts, "mean_marks_ms": mean_marks(metrics)}


def run(options: Options) -> dict:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                ServerProcess(options.model_path, "default", tuple(flags.split()), START_TIMEOUT_S)
            )
            for flags in options.arms.split(";")
        ]
        rows = asyncio.run(speak_to_all(options, servers))
        counts = [counted(server.metrics()) for server in servers]
    print("\n".join(map(str, counts)))
    return {"table": report(options, rows), "servers": counts, "rows": rows}


def main() -> None:
    options = read_options(Options(), __doc__)
    document = {
        "benchmark": "first_sound",
        **facts(),
        "config": config_of(options),
        **run(options),
    }
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
