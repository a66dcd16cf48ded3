"""Days of a fleet with up to 100,000 calls at once: how many servers, by which rule.

    python -m benchmark.simulate.fleet --gpu h200 --users 46000,100000 --json FILE

Two steps. What a server gives its users, by their number, comes from the simulation of every turn;
--quality takes it from an earlier document. A day then goes from session to session (day.py), with
arrivals as those of real services, a rollout, servers that fail and a zone that is lost at the
busiest moment, for several ways to have servers. benchmark/notes/simulation.md says what that
leaves out.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmark.load.provenance import facts
from benchmark.simulate.day import QUANTILES, Day, FleetSpec, Quality, simulate_day
from benchmark.simulate.traffic import DAY_S, Traffic
from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.config import PlanConfig
from sglang_live.extensions.planner.config import parse_args as parse_plan
from sglang_live.extensions.planner.layouts import Layout, layouts
from sglang_live.extensions.planner.memory import memory_of
from sglang_live.extensions.planner.search import world_of
from sglang_live.extensions.planner.simulation.run import World

_ARM = "all"
ARMS: dict[str, dict[str, bool]] = {
    "fixed at the peak": {"scales": False, "moves": False},
    "least loaded, waits for calls to end": {"moves": False},
    "scaled, moves": {},
    "scaled, moves, N+1 without a zone in reserve": {"covers_zone": False},
}
# Student's t for 95 %, by number of seeds.
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """
    users: sessions at once in the busiest moment, one fleet each.
    layout: number of the layout of a server, in the order of sglang_live.extensions.planner.
    sessions: that a server serves; within the target by sglang_live.extensions.planner.
    points: users of one server at which its turns are simulated; the last ones are too many.
    quality: document whose figures are taken instead.
    """

    plan: PlanConfig
    users: tuple[int, ...]
    sessions: int
    points: tuple[int, ...]
    layout: int
    seeds: int
    quality: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        if min(*self.users, *self.points, self.sessions) < 1 or len(self.points) < 2:
            raise ValueError("--users, --points and --sessions are from 1 on, --points two or more")
        if list(self.points) != sorted(set(self.points)) or self.points[-1] < self.sessions:
            raise ValueError("--points rise, and the last one is at least --sessions")
        if self.seeds not in _T:
            raise ValueError(f"--seeds is from {min(_T)} to {max(_T)}")

    @property
    def server(self) -> Layout:
        return layouts(24)[self.layout]


def quality_of(world: World, points: tuple[int, ...]) -> Quality:
    """Simulates every turn of one server at each number of users."""
    audio_ms, rates = [], []
    for n_users in points:
        run = world.simulate(_ARM, n_users, 0)
        records = [row.record for row in run.rows]
        late_ms = [r.ttfp_after_detection_ms for r in records if r.ok]
        found = np.quantile([ms for ms in late_ms if ms is not None], QUANTILES)
        audio_ms.append(tuple(map(float, found.round(1))))
        rates.append(round(len(records) / (run.wall_s * n_users), 4))
        _say(f"{n_users} users of one server: P50 {np.median(found):.0f} ms")
    return Quality(users=points, first_audio_ms=tuple(audio_ms), turns_per_s=tuple(rates))


def quality_in(path: Path) -> Quality:
    """Of an earlier document; those of before December 2026 have three quantiles alone."""
    kept = json.loads(path.read_text("utf-8"))["quality"]
    if isinstance(kept, list):
        known = [one["first_audio_p50_p90_p99_ms"] for one in kept]
        spread = [np.interp(QUANTILES, (0.5, 0.9, 0.99), of_three) for of_three in known]
        return Quality(
            users=tuple(one["users"] for one in kept),
            first_audio_ms=tuple(tuple(one.round(1).tolist()) for one in spread),
            turns_per_s=tuple(one["turns_per_s"] for one in kept),
        )
    return Quality(
        users=tuple(kept["users"]),
        first_audio_ms=tuple(map(tuple, kept["first_audio_ms"])),
        turns_per_s=tuple(kept["turns_per_s"]),
    )


@dataclass(frozen=True, slots=True)
class Job:
    users: int
    arm: str
    seed: int


def day_of(job: Job, spec: FleetSpec, quality: Quality, traffic: Traffic) -> Day:
    spec = replace(spec, users=job.users, **ARMS[job.arm])
    # Sessions that are open in each window, of one arrival per second on average.
    n_windows = len(traffic.window_rates)
    windows_s = (np.arange(n_windows) + 0.5) * DAY_S / n_windows
    still_open = np.exp(-np.maximum(0.0, windows_s - spec.least_s) / spec.more_s)
    rates = traffic.window_rates / traffic.window_rates.mean()
    n_open = np.fft.ifft(np.fft.fft(rates) * np.fft.fft(still_open)).real * DAY_S / n_windows
    arrivals_s = traffic.arrivals_s(job.users / n_open.max() * DAY_S, job.seed)
    first, busiest_s = job.users * n_open[0] / n_open.max(), float(windows_s[n_open.argmax()])
    return simulate_day(arrivals_s, int(first), busiest_s, spec, quality, job.seed)


@dataclass(frozen=True, slots=True)
class Figure:
    """Mean over the seeds. within: half of its 95 % interval."""

    mean: float
    within: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One way to have servers. figures: by name of a field of Day; a pair's are numbered."""

    users: int
    arm: str
    figures: dict[str, Figure]


def summary(users: int, arm: str, days: list[Day]) -> Fleet:
    figures = {}
    for one in fields(Day):
        columns = np.array([np.atleast_1d(getattr(day, one.name)) for day in days], float).T
        for n, column in enumerate(columns.tolist()):
            name = one.name if len(columns) == 1 else f"{one.name}.{n}"
            within = _T[len(column)] * stdev(column) / math.sqrt(len(column))
            figures[name] = Figure(round(fmean(column), 4), round(within, 4))
    return Fleet(users=users, arm=arm, figures=figures)


def table(fleets: list[Fleet]) -> str:
    lines = [
        "| calls at the peak | servers | GPUs at most | GPU-hours | refused, % (in the outage) | "
        "cut off, % | moves per 100 calls (of losses) | a drain takes, P50 / P95 min | "
        "first audio P50 / P90 / P99, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for fleet in fleets:
        f = {name: one.mean for name, one in fleet.figures.items()}
        hours = fleet.figures["gpu_hours"]
        audio = " / ".join(f"{f[f'first_audio_ms.{n}']:.0f}" for n in range(3))
        lines.append(
            f"| {fleet.users:,} | {fleet.arm} | {f['gpus_most']:,.0f} | {hours.mean:,.0f} ± "
            f"{hours.within:,.0f} | {f['refused']:.3f} ({f['refused_in_outage']:.2f}) | "
            f"{f['failed']:.3f} | {f['moved']:.2f} ({f['of_loss']:.2f}) | "
            f"{f['drain_min.0']:.1f} / {f['drain_min.1']:.1f} | {audio} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    if config.quality is not None:
        quality = quality_in(config.quality)
    else:
        plan = config.plan
        memory = memory_of(config.server.placement, plan.gpu.free_gib, plan.sizes, plan.model)
        quality = quality_of(world_of(plan, config.server, memory), config.points)
    spec = FleetSpec(users=config.users[0], sessions=config.sessions, n_gpus=config.server.n_gpus)
    traffic = Traffic.load()
    cases = [(users, arm) for users in config.users for arm in ARMS]
    jobs = [Job(users, arm, seed) for users, arm in cases for seed in range(config.seeds)]
    with get_context("fork").Pool() as pool:
        tasks = [(job, spec, quality, traffic) for job in jobs]
        # The largest first: the last ones then end at about the same time.
        days = pool.starmap(day_of, tasks[::-1], chunksize=1)[::-1]
    found = dict(zip(jobs, days, strict=True))
    fleets = [
        summary(users, arm, [found[Job(users, arm, seed)] for seed in range(config.seeds)])
        for users, arm in cases
    ]
    print(f"Simulated, modelled device: {config.plan.model.name}; servers: {config.server.name}")
    print(table(fleets))
    _write(config, spec, quality, fleets)
    return 0


def _write(config: FleetConfig, spec: FleetSpec, quality: Quality, fleets: list[Fleet]) -> None:
    if config.json is None:
        return
    known = facts(config.plan.gpu.device_model)
    known["device"] = f"simulated: {config.plan.model.name}"
    of_spec = asdict(spec)
    of_arms = ("users", "scales", "moves", "covers_zone")
    document: dict[str, Any] = {
        "benchmark": "fleet",
        **known,
        "config": {
            "layout": config.server.name,
            "seeds": config.seeds,
            "pattern": asdict(config.plan.pattern),
            **{name: value for name, value in of_spec.items() if name not in of_arms},
        },
        "quality": asdict(quality),
        "fleets": [
            {
                "users": one.users,
                "arm": one.arm,
                "mean_and_half_of_95_percent": {
                    name: [figure.mean, figure.within] for name, figure in one.figures.items()
                },
            }
            for one in fleets
        ],
    }
    config.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    _say(f"wrote {config.json}")


def parse_args(argv: list[str] | None = None) -> FleetConfig:
    """Other flags are those of sglang_live.extensions.planner."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.simulate.fleet", allow_abbrev=False)
    add = parser.add_argument
    add("--users", type=_numbers, default=(46_000, 100_000), metavar="N,N")
    add("--sessions", type=int, default=139, metavar="N", help="that a server serves")
    points = (20, 40, 60, 80, 100, 120, 140, 160)
    add("--points", type=_numbers, default=points, metavar="N,N")
    add("--quality", type=Path, metavar="FILE", help="a document of this benchmark, for its turns")
    add(
        "--layout",
        type=int,
        default=2,
        choices=range(5),
        help="as the planner lists them",
    )
    add("--seeds", type=int, default=3, help="days of each fleet")
    add("--json", type=Path, metavar="FILE")
    own, rest = parser.parse_known_args(argv)
    try:
        return FleetConfig(plan=parse_plan(rest), **vars(own))
    except (ValueError, BadInputError) as error:
        parser.error(str(error))


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(int(number) for number in value.split(","))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
