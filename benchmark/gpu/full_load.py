"""Users at full size: a server with random weights, and one load after the other on it.

Responses have drawn lengths (lab/random_model). The document is written again after each load, and
a further load begins only if it ends within the check's time, by the longest so far.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmark.gpu.findings import Findings
from benchmark.gpu.full_size import GRAPH_SIZES, random_model, remaining_s, server_args
from benchmark.gpu.places import on_device, platform_of
from benchmark.load.config import LoadConfig, Run
from benchmark.load.point import RunResult, Workload, measure_on, server_for
from benchmark.load.server import ServerError

# Of a check's time, for imports before it and for the end of the server.
_END_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """
    Attributes:
        scale: of the model, published or tiny.
        policies: of the server, as an arm of benchmark.voice_load.
        sessions: of the loads, one after the other.
        warm_up: users that take one turn before, so that kernels are compiled.
        turns: of each user.
        barge_in: share of responses that the user interrupts.
        first_ms, late_ms: what the mean and P90 of the first audio may be, after the turn's end.
        graph_sizes: streams for which rounds are captured; no more run at once.
        server_args: more flags of the server, between spaces.
        budget_s: of the check; gpu_check.sh may give less.
    """

    scale: str = "published"
    policies: str = "off+no-overlap"
    sessions: tuple[int, ...] = (32,)
    warm_up: int = 4
    turns: int = 4
    barge_in: float = 0.0
    first_ms: float = 250.0
    late_ms: float = 500.0
    graph_sizes: tuple[int, ...] = GRAPH_SIZES
    server_args: str = ""
    start_timeout_s: float = 170.0
    turn_timeout_s: float = 30.0
    budget_s: float = 280.0


TINY = Options(
    scale="tiny",
    sessions=(1, 2),
    warm_up=1,
    graph_sizes=(1, 4),
    turns=1,
    start_timeout_s=300.0,
    turn_timeout_s=90.0,
    budget_s=900,
)


def run(options: Options, device: str, seed: int) -> Iterator[Findings]:
    began_s = time.monotonic()
    figures: dict[str, Any] = {"platform": platform_of(device), "policies": options.policies}
    loads: dict[int, dict[str, Any]] = {}
    with random_model(options.scale) as folder, on_device(device) as stage_args:
        config = LoadConfig(
            policies=(options.policies,),
            sessions=options.sessions,
            turns=options.turns,
            barge_in=options.barge_in,
            repeats=1,
            seed=seed,
            model_path=str(folder),
            drawn_replies=True,
            server_args=(
                *stage_args,
                *server_args(device, options.graph_sizes),
                *options.server_args.split(),
            ),
            start_timeout_s=options.start_timeout_s,
            turn_timeout_s=options.turn_timeout_s,
        )
        workload = Workload.load(config)
        most = Run(repeat=0, sessions=max(options.sessions), policies=options.policies)
        try:
            with server_for(config, most) as server:
                figures["start_s"] = server.start_s
                first = replace(most, sessions=options.warm_up)
                warm_up = measure_on(
                    server, replace(config, turns=1, barge_in=0.0), first, workload
                )
                figures["warm_up"] = judge(warm_up)
                longest_s = 0.0
                for n in options.sessions:
                    load_began_s = time.monotonic()
                    left_s = remaining_s(options.budget_s, began_s, load_began_s)
                    if loads and left_s < longest_s + _END_S:
                        figures["left_out"] = [m for m in options.sessions if m not in loads]
                        break
                    cell = replace(most, sessions=n)
                    loads[n] = judge(measure_on(server, config, cell, workload))
                    longest_s = max(longest_s, time.monotonic() - load_began_s)
                    yield findings(figures, loads, options)
        except ServerError as error:
            first, *rest = str(error).splitlines()
            yield Findings(figures, (first,), tuple(rest))
            return
    yield findings(figures, loads, options)


def findings(figures: dict[str, Any], loads: dict[int, Any], options: Options) -> Findings:
    problems = [
        f"{load['n_failed']} of {load['n_turns']} turns of {n} users failed: {load['errors'][:3]}"
        for n, load in loads.items()
        if load["n_failed"]
    ]
    silent = [f"{n} users heard nothing" for n, load in loads.items() if not load["after_end_ms"]]
    lines = [_line(n, load, options) for n, load in loads.items()]
    if left_out := figures.get("left_out"):
        lines.append(f"no time for {left_out} users")
    return Findings(figures | {"loads": dict(loads)}, (*problems, *silent), tuple(lines))


def judge(result: RunResult) -> dict[str, Any]:
    """Figures of one load. First audio counts from the user's last sound, and from the turn's end
    as the server has found it."""
    records = [row.record for row in result.rows]
    ok = [record for record in records if record.ok]
    return {
        "n_turns": len(records),
        "n_failed": len(records) - len(ok),
        "errors": sorted({f"{r.status}: {r.error}" for r in records if not r.ok}),
        "first_audio_ms": _times([record.ttfp_ms for record in ok]),
        "after_end_ms": _times([record.ttfp_after_detection_ms for record in ok]),
        "gaps_over_100ms": sum(record.gaps_over_100ms for record in records),
        "longest_gap_ms": max((gap for r in records for gap in r.gaps_ms), default=0.0),
        "chunks_due": sum(record.chunks_due for record in records),
        "chunks_on_time": sum(record.chunks_on_time for record in records),
        "audio_s": sum(record.audio_s for record in records),
        "wall_s": result.wall_s,
        "late_frames": result.late_frames,
        "talker_frames": result.talker_frames,
        "processes": {name: asdict(usage) for name, usage in result.usage.items()},
        "turns": [row.to_json() for row in result.rows],
    }


def _times(values_ms: list[float | None]) -> dict[str, float]:
    """Empty without any."""
    known = [value for value in values_ms if value is not None]
    if not known:
        return {}
    p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
    mean = statistics.mean(known)
    return {"n": len(known), "mean": mean, "p50": p50, "p90": p90, "p99": p99, "worst": max(known)}


def _line(n: int, load: dict[str, Any], options: Options) -> str:
    times = load["after_end_ms"]
    if not times:
        return f"{n} users: no audio"
    held = (
        times["mean"] <= options.first_ms
        and times["p90"] <= options.late_ms
        and not load["gaps_over_100ms"]
        and not load["n_failed"]
    )
    return (
        f"{n} users, {load['n_turns']} turns: first audio {times['mean']:.0f} ms after the turn's "
        f"end in the mean, {times['p90']:.0f} P90, {times['worst']:.0f} at worst; "
        f"{load['gaps_over_100ms']} gaps: the goal is {'reached' if held else 'missed'}"
    )
