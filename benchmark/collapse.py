"""Frame mode against a capped KV pool until it is full, with bounded and unbounded sessions.

    python -m benchmark.collapse --runs 20 --json out.json

Every run has a fresh server; the order of arms is drawn. `off` is stock SGLang behind the same
gateway, `all` bounds its sessions (Metronome, section 3 and 5.2; workload W6). A run has collapsed
if a frame had no result, or was not answered within two seconds when the run ended.
"""

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmark.frames.sessions import run_sessions, voices
from benchmark.frames.stream import FrameRow
from benchmark.frames.watch import predicted_s, saturated_s
from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess

WORKLOADS = Path(__file__).parent / "workloads"
START_TIMEOUT_S = 300.0
_PATIENCE_S = 2.0
_BUCKET_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field.

    runs: number of runs of each arm.
    pool_tokens: size of the thinker's KV pool.
    window_tokens: window that each session keeps in the arm `all`.
    stagger_s: time between the starts of two sessions.
    """

    arms: str = "off,all"
    runs: int = 20
    sessions: int = 8
    seconds: float = 60.0
    frame_ms: int = 480
    max_tokens: int = 4
    pool_tokens: int = 8192
    window_tokens: int = 384
    stagger_s: float = 0.1
    model_path: str = "demo-random"
    clips: str = str(WORKLOADS / "clips")
    seed: int = 1
    json: str = ""


def server_args(arm: str, options: Options) -> tuple[str, ...]:
    window = ("--retention-window", str(options.window_tokens)) if arm != "off" else ()
    return (f"--thinker.max-total-tokens={options.pool_tokens}", *window)


def call_in(server: ServerProcess, options: Options, seed: int) -> dict:
    """One run's frames, and the state of the pool during it."""
    sessions = run_sessions(
        server,
        sounds=voices(Path(options.clips), options.sessions, seed),
        every_s=options.stagger_s,
        lasts_s=options.seconds,
        detection={
            "type": "frames",
            "frame_ms": options.frame_ms,
            "max_tokens": options.max_tokens,
        },
        model=Path(options.model_path).name,
    )
    streams, began_s, samples = asyncio.run(sessions)
    rows = [row for stream in streams for row in stream.rows]
    late = options.seconds - _PATIENCE_S
    lost = [r for s in streams for r in s.unanswered(began_s) if r.due_s < late]
    return summary(rows, lost, samples, [s.ended_early for s in streams if s.ended_early])


def summary(
    rows: list[FrameRow], lost: list[FrameRow], samples: list[dict], ended: list[str]
) -> dict:
    answered = [row for row in rows if row.latency_ms is not None]
    empty = [row for row in rows if row.outcome == "empty"]
    dropped = [row for row in rows if row.outcome == "dropped"]
    stalled_s = min((row.due_s for row in (*empty, *dropped, *lost)), default=None)
    latencies = np.array([row.latency_ms for row in answered]) if answered else np.zeros(0)
    return {
        "frames": len(rows) + len(lost),
        "on_time": sum(row.outcome == "on_time" for row in rows),
        "late": sum(row.outcome == "late" for row in rows),
        "empty": len(empty),
        "dropped": len(dropped),
        "unanswered": len(lost),
        "ended_early": ended,
        "collapsed": stalled_s is not None,
        "stalled_s": stalled_s,
        "saturated_s": saturated_s(samples),
        "predicted_s": predicted_s(samples),
        "most_full": max((s["share"] or 0 for s in samples), default=None),
        "latency_ms": {
            f"p{q}": float(np.percentile(latencies, q)) if len(latencies) else None
            for q in (50, 90, 99)
        },
        "latency_by_age_ms": _by_age(answered),
        "pool": samples,
    }


def _by_age(rows: list[FrameRow]) -> list[dict]:
    found = []
    for bucket in sorted({int(row.age_s // _BUCKET_S) for row in rows}):
        values = [row.latency_ms for row in rows if row.age_s // _BUCKET_S == bucket]
        p50, p99 = np.percentile(values, (50, 99))
        found.append({"from_s": bucket * _BUCKET_S, "n": len(values), "p50": p50, "p99": p99})
    return found


def line(arm: str, run: dict) -> str:
    def shown(value: float | None, form: str = "{:.1f}") -> str:
        return "n/a" if value is None else form.format(value)

    latency = run["latency_ms"]
    return (
        f"{arm:<5} {run['frames']:>6} {run['late']:>5} {run['empty']:>6} {run['dropped']:>8} "
        f"{run['unanswered']:>6} {shown(latency['p50']):>8} {shown(latency['p99']):>8} "
        f"{shown(run['most_full'], '{:.2f}'):>5} {shown(run['predicted_s']):>9} "
        f"{shown(run['saturated_s']):>9} {'yes' if run['collapsed'] else 'no':>9}"
    )


def main() -> None:
    options = read_options(Options(), __doc__)
    plan = [(arm, run) for run in range(options.runs) for arm in options.arms.split(",")]
    random.Random(options.seed).shuffle(plan)
    print("arm   frames  late  empty  dropped   lost   P50 ms   P99 ms  full predicted saturated ")
    rows = []
    for arm, number in plan:
        args = server_args(arm, options)
        with ServerProcess(options.model_path, arm, args, START_TIMEOUT_S) as server:
            run = call_in(server, options, options.seed + number)
        rows.append({"arm": arm, "run": number, **run})
        print(line(arm, run), flush=True)
        if options.json:
            document = {
                "benchmark": "collapse",
                **facts(),
                "config": config_of(options),
                "rows": rows,
            }
            Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    for arm in options.arms.split(","):
        runs = [row for row in rows if row["arm"] == arm]
        print(f"{arm}: {sum(row['collapsed'] for row in runs)} of {len(runs)} collapsed")


if __name__ == "__main__":
    main()
