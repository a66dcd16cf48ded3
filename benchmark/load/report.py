"""The JSON document of a load, and notes on the validity of its tables."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.load.config import LoadConfig
from benchmark.load.point import RunResult, result_to_json
from benchmark.load.provenance import ROOT
from benchmark.load.tables import number
from sglang_live.extensions.planner.simulation.load.stats import (
    PointStats,
    RunTotals,
    capacity,
    point_stats,
    useful_rps,
    viable_rps,
)

# With a larger share of late audio frames the load generator itself was short of CPU.
LATE_FRAMES_LIMIT = 0.01


def collect(results: list[RunResult]) -> list[PointStats]:
    """All repeats of an arm at a point together, in the order of their first runs."""
    grouped: dict[tuple[int, float | None, str], list[RunResult]] = {}
    for result in results:
        run = result.run
        grouped.setdefault((run.sessions, run.rate_rps, run.policies), []).append(result)
    return [
        point_stats(
            policies,
            sessions,
            [row.record for result in group for row in result.rows],
            [_totals(result) for result in group],
            rate_rps,
        )
        for (sessions, rate_rps, policies), group in grouped.items()
    ]


def notes(points: list[PointStats]) -> list[str]:
    """Notes on the validity of the table."""
    lines = []
    for policies, arm in _arms(points).items():
        lines.append(
            f"{policies}: capacity within SLO {number(capacity(arm))} sessions, "
            f"useful RPS {number(useful_rps(arm), 3)} (highest turns/s at continuity >= 99 %)"
        )
        if any(point.rate_rps for point in arm):
            lines[-1] += f", viable at {number(viable_rps(arm), 2)} arrivals/s"
    for point in points:
        place = f"{point.policies} at {point.sessions} sessions"
        if point.late_frames > LATE_FRAMES_LIMIT:
            lines.append(
                f"{place}: {100 * point.late_frames:.1f} % of the users' frames were over 50 ms "
                "late: this machine is too small for users and server together"
            )
        if point.side_errors:
            lines.append(
                f"{place}: the server refused {point.side_errors} truncations or acks; "
                "their codes are in the document"
            )
        if point.barge_ins_planned > point.barge_ins:
            lines.append(
                f"{place}: {point.barge_ins_planned - point.barge_ins} of "
                f"{point.barge_ins_planned} planned barge-ins came too late: nothing was playing"
            )
        if point.early_replies:
            lines.append(
                f"{place}: {point.early_replies} responses began before the user had ended"
            )
    return lines


def document(config: LoadConfig, results: list[RunResult], facts: dict[str, Any]) -> dict[str, Any]:
    points = collect(results)
    return {
        **facts,
        "benchmark": "voice_load",
        "workload": workload_name(config),
        "seed": config.seed,
        "config": {k: _plain(v) for k, v in asdict(config).items()},
        "points": [asdict(point) for point in points],
        "arms": {
            policies: {
                "capacity_sessions": capacity(arm),
                "useful_rps": useful_rps(arm),
                "viable_rps": viable_rps(arm),
            }
            for policies, arm in _arms(points).items()
        },
        "runs": [result_to_json(result) for result in results],
    }


def workload_name(config: LoadConfig) -> str:
    single = config.open_loop_rps and config.turns == 1
    parts = ["W1, single turns" if single else "W2, no barge-in"]
    if config.barge_in or config.false_triggers:
        parts = [f"W4, barge-in {config.barge_in:g}, false triggers {config.false_triggers:g}"]
    if config.open_loop_rps and not single:
        parts.append("open loop")
    if config.storm:
        parts.append("storms")
    return ", ".join(parts)


def _arms(points: list[PointStats]) -> dict[str, list[PointStats]]:
    arms: dict[str, list[PointStats]] = {}
    for point in points:
        arms.setdefault(point.policies, []).append(point)
    return arms


def _totals(result: RunResult) -> RunTotals:
    return RunTotals(
        wall_s=result.wall_s,
        cpu_s=sum(usage.cpu_s for usage in result.usage.values()),
        peak_rss_mib=sum(usage.peak_rss_mib for usage in result.usage.values()),
        late_frames=result.late_frames,
        barge_ins_planned=result.barge_ins_planned,
        talker_frames=result.talker_frames,
        side_errors=len(result.side_errors),
        storm_rows=result.storm_rows,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        # Results are in the repository: no paths of the machine.
        return str(value.relative_to(ROOT)) if value.is_relative_to(ROOT) else value.name
    return value
