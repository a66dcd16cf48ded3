"""Overhead of a turn outside the models, and the parts of its time to first audio.

    python -m benchmark.turn_cost --turns 20 --json out.json
    python -m benchmark.turn_cost --model-path demo --ask "Tell me a story." --cores 1 --turns 5

One user, typed questions one after another, without pacing. RTF is the time of a turn per second of
its sound; with `--cores 1` server and client share one. Every stage logs when its model computes.
The overhead of a turn is the share of the time from the question to `response.done` in which no
stage's model computes: scheduling, sampling, transport, gateway, and the client itself.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark.load.provenance import facts
from benchmark.load.server import ServerProcess
from lab import forward_log
from lab.attachment import attach_to_own_server
from lab.forward_log import covered_s, read_spans
from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import RealtimeClient
from sglang_live.clock import MonotonicClock

START_TIMEOUT_S = 240.0
WARM_UP_TURNS = 2
QUESTION = "tell me about the river"
MARK = "sglang_live_turn_mark_seconds"


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Times of a turn.

    turn_s: from the question to `response.done`.
    models_s: part of it in which at least one model computes.
    """

    turn_s: float
    models_s: float
    audio_s: float

    @property
    def overhead(self) -> float:
        return 1 - self.models_s / self.turn_s

    @property
    def rtf(self) -> float:
        return self.turn_s / self.audio_s


async def ask_all(
    url: str, model: str, question: str, turns: int
) -> list[tuple[float, float, float]]:
    """(asked_s, done_s, audio_s) of each turn; times on CLOCK_MONOTONIC."""
    done_at: list[float] = []

    def note(event: dict) -> None:
        if event["type"] == "response.done":
            done_at.append(time.monotonic())

    asked = []
    async with RealtimeClient(LoadOptions(url=url, model=model), MonotonicClock(), note) as client:
        for _ in range(turns + WARM_UP_TURNS):
            begin = time.monotonic()
            record = await client.ask(question)
            if not record.ok:
                raise RuntimeError(f"turn failed: {record.status}: {record.error}")
            asked.append((begin, record.audio_s))
    pairs = zip(asked, done_at, strict=True)
    return [(begin, end, audio_s) for (begin, audio_s), end in pairs][WARM_UP_TURNS:]


def mean_marks(metrics: str) -> dict[str, float]:
    """Mean milliseconds since the start of a turn, by mark, from the text of /metrics."""
    sums: dict[str, dict[str, float]] = {"sum": {}, "count": {}}
    for line in metrics.splitlines():
        for part, values in sums.items():
            if line.startswith(f"{MARK}_{part}{{"):
                name = line.split('mark="')[1].split('"')[0]
                values[name] = float(line.rsplit(" ", 1)[1])
    means = {n: 1000 * sums["sum"][n] / c for n, c in sums["count"].items() if c}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def measure(model_path: str, question: str, turns: int, server_args: tuple[str, ...]) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        attach_to_own_server(forward_log.environment(Path(directory)))
        with ServerProcess(model_path, "off", server_args, START_TIMEOUT_S) as server:
            asked = asyncio.run(ask_all(server.url, Path(model_path).name, question, turns))
            address = f"http://127.0.0.1:{server.port}/metrics"
            with urllib.request.urlopen(address, timeout=10) as response:
                marks = mean_marks(response.read().decode())
            start_s = server.start_s
        spans = read_spans(Path(directory))
    costs = [TurnCost(end - begin, covered_s(spans, begin, end), a) for begin, end, a in asked]
    overheads = [cost.overhead for cost in costs]
    return {
        "turns": [asdict(cost) | {"overhead": cost.overhead, "rtf": cost.rtf} for cost in costs],
        "rtf_median": statistics.median(cost.rtf for cost in costs),
        "overhead_median": statistics.median(overheads),
        "overhead_of_all": 1 - sum(c.models_s for c in costs) / sum(c.turn_s for c in costs),
        "mean_marks_ms": marks,
        "server_start_s": start_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--model-path", default="demo-random")
    parser.add_argument("--ask", default=QUESTION)
    parser.add_argument("--cores", type=int, help="of this machine; all by default")
    parser.add_argument("--server-arg", action="append", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    result = measure(args.model_path, args.ask, args.turns, tuple(args.server_arg))
    config = {"model_path": args.model_path, "ask": args.ask, "cores": len(cores)}
    print(f"RTF: {result['rtf_median']:.3f} (median) on {len(cores)} cores")
    print(f"overhead outside the models: {100 * result['overhead_of_all']:.1f} % of all turns,")
    print(f"  median turn {100 * result['overhead_median']:.1f} %, {args.turns} turns")
    print("mean time since a turn began, by mark:")
    for name, ms in result["mean_marks_ms"].items():
        print(f"  {name:24} {ms:8.1f} ms")
    if args.json:
        args.json.write_text(
            json.dumps({**facts(), "config": config, **result}, indent=2) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
