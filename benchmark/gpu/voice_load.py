"""A short run of benchmark.voice_load: users at real-time pace, of whom some interrupt."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from benchmark.gpu.findings import Findings
from benchmark.gpu.places import on_device, platform_of
from benchmark.load.config import LoadConfig, Run
from benchmark.load.point import RunResult, Workload, measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """
    Attributes:
        policies: of the server, as of --policies.
        server_args: more flags of the server, between spaces.
    """

    sessions: int = 8
    turns: int = 3
    barge_in: float = 0.2
    policies: str = "all"
    server_args: str = ""
    start_timeout_s: float = 150.0
    turn_timeout_s: float = 30.0


TINY = Options(sessions=1, turns=1, barge_in=0.0)


def run(options: Options, device: str, seed: int) -> Findings:
    platform = platform_of(device)
    with on_device(device) as server_args:
        config = LoadConfig(
            policies=(options.policies,),
            sessions=(options.sessions,),
            turns=options.turns,
            barge_in=options.barge_in,
            repeats=1,
            seed=seed,
            server_args=(*server_args, *options.server_args.split()),
            start_timeout_s=options.start_timeout_s,
            turn_timeout_s=options.turn_timeout_s,
        )
        cell = Run(repeat=0, sessions=options.sessions, policies=options.policies)
        result = measure(config, cell, Workload.load(config))
    return judge(platform, result)


def judge(platform: str, result: RunResult) -> Findings:
    records = [row.record for row in result.rows]
    ttfp_ms = sorted(r.ttfp_ms for r in records if r.ttfp_ms is not None and not r.barged)
    figures: dict[str, Any] = {
        "platform": platform,
        "n_turns": len(records),
        "n_failed": sum(not record.ok for record in records),
        "n_interrupted": sum(record.barged for record in records),
        "ttfp_median_ms": statistics.median(ttfp_ms) if ttfp_ms else None,
        "ttfp_worst_ms": ttfp_ms[-1] if ttfp_ms else None,
        "gaps_over_100ms": sum(record.gaps_over_100ms for record in records),
        "chunks_due": sum(record.chunks_due for record in records),
        "chunks_on_time": sum(record.chunks_on_time for record in records),
        "late_frames": result.late_frames,
        "server_start_s": result.server_start_s,
        "talker_frames": result.talker_frames,
        "processes": {name: asdict(usage) for name, usage in result.usage.items()},
        "turns": [row.to_json() for row in result.rows],
    }
    problems = [f"a turn failed: {r.status}, {r.error}" for r in records if not r.ok]
    if not ttfp_ms:
        problems.append("no response has audio")
    return Findings(figures, tuple(problems), tuple(_lines(figures)))


def _lines(figures: dict[str, Any]) -> list[str]:
    lines = [f"{figures['n_turns']} turns, {figures['n_failed']} failed"]
    if figures["ttfp_median_ms"] is not None:
        lines.append(
            f"first audio after {figures['ttfp_median_ms']:.0f} ms in the median, "
            f"{figures['ttfp_worst_ms']:.0f} ms at worst"
        )
    return [
        *lines,
        f"{figures['chunks_on_time']} of {figures['chunks_due']} packets on time, "
        f"{figures['gaps_over_100ms']} audible gaps",
    ]
