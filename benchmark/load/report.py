"""Tables for people and the JSON document that they are made from."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.load.config import LoadConfig
from benchmark.load.point import RunResult, result_to_json
from benchmark.load.provenance import ROOT
from benchmark.load.stats import (
    Distribution,
    PointStats,
    RunTotals,
    capacity,
    point_stats,
    useful_rps,
)

UNKNOWN = "n/a"
# With a larger share of late audio frames the load generator itself was short of CPU.
LATE_FRAMES_LIMIT = 0.01


def collect(results: list[RunResult]) -> list[PointStats]:
    """All repeats of an arm at a point together, in the order they first ran."""
    grouped: dict[tuple[int, str], list[RunResult]] = {}
    for result in results:
        grouped.setdefault((result.run.sessions, result.run.policies), []).append(result)
    return [
        point_stats(
            policies,
            sessions,
            [row.record for result in group for row in result.rows],
            [_totals(result) for result in group],
        )
        for (sessions, policies), group in grouped.items()
    ]


def table(points: list[PointStats]) -> str:
    header = (
        "arm",
        "sessions",
        "turns ok",
        "failed",
        "TTFP ms 50/90/95",
        "n",
        "end of turn 50",
        "TTFP after it 50/90/95",
        "RTF 50/90",
        "continuous",
        "turns/s",
        "useful/s",
        "SLO",
        "CPU s/audio s",
        "RSS MiB",
    )
    rows = [
        (
            point.policies,
            str(point.sessions),
            str(point.completed),
            str(point.failed),
            _percentiles(point.ttfp_ms),
            str(point.ttfp_ms.n),
            _number(point.end_of_turn_ms.p50),
            _percentiles(point.ttfp_after_detection_ms),
            f"{_number(point.rtf.p50, 2)}/{_number(point.rtf.p90, 2)}",
            UNKNOWN if point.continuity is None else f"{100 * point.continuity:.1f} %",
            f"{point.turns_per_s:.3f}",
            f"{point.useful_turns_per_s:.3f}",
            {None: UNKNOWN, True: "met", False: "missed"}[point.within_slo],
            _number(point.cpu_s_per_audio_s, 2),
            _number(point.peak_rss_mib),
        )
        for point in points
    ]
    return _aligned([header, *rows])


def process_table(results: list[RunResult]) -> str:
    """CPU and memory by process name, of every run."""
    rows = [("arm", "sessions", "repeat", "process", "count", "CPU s", "peak RSS MiB")]
    for result in results:
        run = result.run
        for name, usage in result.usage.items():
            numbers = (str(usage.n_processes), f"{usage.cpu_s:.1f}", f"{usage.peak_rss_mib:.0f}")
            rows.append((run.policies, str(run.sessions), str(run.repeat), name, *numbers))
    return _aligned(rows)


def notes(points: list[PointStats]) -> list[str]:
    """What a reader must know before trusting the table."""
    lines = []
    for policies in dict.fromkeys(point.policies for point in points):
        arm = [point for point in points if point.policies == policies]
        lines.append(
            f"{policies}: capacity within SLO {_known(capacity(arm))} sessions, "
            f"useful RPS {_number(useful_rps(arm), 3)} (highest turns/s at continuity >= 99 %)"
        )
    for point in points:
        place = f"{point.policies} at {point.sessions} sessions"
        if point.late_frames > LATE_FRAMES_LIMIT:
            lines.append(
                f"{place}: {100 * point.late_frames:.1f} % of the callers' frames were over 50 ms "
                "late: this machine is too small for callers and server together"
            )
        if point.early_replies:
            lines.append(f"{place}: {point.early_replies} replies began before the user had ended")
    return lines


def document(config: LoadConfig, results: list[RunResult], facts: dict[str, Any]) -> dict[str, Any]:
    points = collect(results)
    return {
        **facts,
        "benchmark": "voice_load",
        "workload": "W2, no barge-in",
        "seed": config.seed,
        "config": {k: _plain(v) for k, v in asdict(config).items()},
        "points": [asdict(point) for point in points],
        "arms": {
            policies: {
                "capacity_sessions": capacity([p for p in points if p.policies == policies]),
                "useful_rps": useful_rps([p for p in points if p.policies == policies]),
            }
            for policies in dict.fromkeys(point.policies for point in points)
        },
        "runs": [result_to_json(result) for result in results],
    }


def _totals(result: RunResult) -> RunTotals:
    return RunTotals(
        wall_s=result.wall_s,
        cpu_s=sum(usage.cpu_s for usage in result.usage.values()),
        peak_rss_mib=sum(usage.peak_rss_mib for usage in result.usage.values()),
        late_frames=result.late_frames,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        # Results are kept in the repository: they must not tell where that lay.
        return str(value.relative_to(ROOT)) if value.is_relative_to(ROOT) else value.name
    return value


def _percentiles(distribution: Distribution) -> str:
    return "/".join(_number(p) for p in (distribution.p50, distribution.p90, distribution.p95))


def _number(value: float | None, digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _known(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
