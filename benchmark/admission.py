"""Admission control in frame mode, against the number of sessions found by brute force.

    python -m benchmark.admission --ladder 16,24,32,40,48,56 --json out.json

Brute force first: a fresh server per number of sessions, without admission; N* is the highest
number at which no frame is empty and P90 keeps the target. Then an open system (Metronome, section
5.3): users arrive one after the other, stay for a while, and do not return after a refusal; the
admission controller decides, with bounded sessions and with unbounded ones.
"""

import asyncio
import json
import math
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np

from benchmark.frames.sessions import run_sessions, voices
from benchmark.frames.stream import Stream
from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess
from sglang_live.policy.policies import POLICIES

WORKLOADS = Path(__file__).parent / "workloads"
START_TIMEOUT_S = 300.0
# Share of a frame's period, the controller's target (capacity/control.py).
TARGET_SHARE = 0.5
# The last share of the open system's time, which is judged.
_SETTLED_SHARE = 0.4
_UNBOUNDED = "+".join(name for name in POLICIES if name != "retention")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field.

    rate: arriving users per second.
    call_seconds: duration of a session; 0: until the end.
    seconds: duration of the open system.
    ladder_seconds: duration of each step of brute force.
    """

    ladder: str = "16,24,32,40,48,56"
    ladder_seconds: float = 45.0
    rate: float = 1.0
    call_seconds: float = 90.0
    seconds: float = 240.0
    frame_ms: int = 2000
    max_tokens: int = 4
    pool_tokens: int = 65536
    window_tokens: int = 384
    model_path: str = "demo-random"
    clips: str = str(WORKLOADS / "clips")
    seed: int = 1
    json: str = ""


def offer(
    server: ServerProcess,
    options: Options,
    n: int,
    every_s: float,
    lasts_s: float,
    session_s: float = math.inf,
) -> tuple[list[Stream], list[dict]]:
    sessions = run_sessions(
        server,
        sounds=voices(Path(options.clips), n, options.seed),
        every_s=every_s,
        lasts_s=lasts_s,
        detection={
            "type": "frames",
            "frame_ms": options.frame_ms,
            "max_tokens": options.max_tokens,
        },
        model=Path(options.model_path).name,
        session_s=session_s,
    )
    streams, _, samples = asyncio.run(sessions)
    return streams, samples


def judged(streams: list[Stream], options: Options, from_s: float, to_s: float) -> dict:
    rows = [r for s in streams for r in s.rows if from_s <= r.due_s < to_s]
    latencies = [row.latency_ms for row in rows if row.latency_ms is not None]
    p50, p90, p99 = np.percentile(latencies, (50, 90, 99)).tolist() if latencies else (None,) * 3
    n_bad = sum(row.outcome in ("empty", "dropped") for row in rows)
    target_ms = TARGET_SHARE * options.frame_ms
    return {
        "frames": len(rows),
        "empty_or_dropped": n_bad,
        "latency_ms": {"p50": p50, "p90": p90, "p99": p99},
        "meets_target": bool(latencies) and not n_bad and p90 <= target_ms,
    }


def step(n: int, options: Options) -> dict:
    policies = "+".join(name for name in POLICIES if name != "admission")
    args = _args(options, bounded=True)
    with ServerProcess(options.model_path, policies, args, START_TIMEOUT_S) as server:
        streams, _ = offer(server, options, n, 0.1, options.ladder_seconds)
    found = judged(streams, options, options.ladder_seconds / 3, options.ladder_seconds - 1)
    return {"sessions": n, **found}


def open_system(bounded: bool, options: Options) -> dict:
    policies = "+".join(POLICIES) if bounded else _UNBOUNDED
    offered = math.ceil(options.rate * options.seconds)
    args = (*_args(options, bounded), "--max-sessions", str(offered))
    with ServerProcess(options.model_path, policies, args, START_TIMEOUT_S) as server:
        streams, samples = offer(
            server,
            options,
            offered,
            every_s=1 / options.rate,
            lasts_s=options.seconds,
            session_s=options.call_seconds or math.inf,
        )
    settled_s = options.seconds * (1 - _SETTLED_SHARE)
    found = judged(streams, options, settled_s, options.seconds - 1)
    settled = [sample for sample in samples if sample["at_s"] >= settled_s]
    return {
        "arm": "window" if bounded else "unbounded",
        "offered": offered,
        "admitted": sum(not stream.refused for stream in streams),
        "refused": sum(stream.refused for stream in streams),
        "ended_early": sum(bool(stream.ended_early) for stream in streams),
        "open": float(np.mean([sample["open"] for sample in settled])),
        "limit": float(np.mean([sample["limit"] for sample in settled])),
        "settled": found,
        "trace": samples,
    }


def _args(options: Options, bounded: bool) -> tuple[str, ...]:
    window = options.window_tokens if bounded else 0
    pool = f"--thinker.max-total-tokens={options.pool_tokens}"
    return (pool, "--retention-window", str(window))


def main() -> None:
    options = read_options(Options(), __doc__)
    document = {"benchmark": "admission", **facts(), "config": config_of(options)}
    document |= {"ladder": [], "open_systems": []}

    def save() -> None:
        if options.json:
            Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")

    for n in [int(text) for text in options.ladder.split(",")]:
        found = step(n, options)
        document["ladder"].append(found)
        print(f"{n} sessions: {found}", flush=True)
        save()
    met = takewhile(lambda found: found["meets_target"], document["ladder"])
    document["n_star"] = max((found["sessions"] for found in met), default=0)
    print(f"N* by brute force: {document['n_star']}")
    for bounded in (True, False):
        found = open_system(bounded, options)
        document["open_systems"].append(found)
        shown = {name: value for name, value in found.items() if name != "trace"}
        print(shown, flush=True)
        save()


if __name__ == "__main__":
    main()
