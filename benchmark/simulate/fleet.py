"""Days of thousands of users on many servers: cost and latency as the load grows.

    python -m benchmark.simulate.fleet --gpu h200 --users 100,300,1000,3000 --price 3

Two steps. What a server gives its users, by their number, comes from the simulation of every turn.
A day then goes from session to session, with arrivals as those of real services, the router's own
choice of a server, and stages that fail. benchmark/notes/simulation.md says what that leaves out.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.load.provenance import facts
from benchmark.simulate.day import Day, FleetSpec, Quality, simulate_day
from benchmark.simulate.traffic import DAY_S, Traffic
from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.config import PlanConfig
from sglang_live.extensions.planner.config import parse_args as parse_plan
from sglang_live.extensions.planner.layouts import Layout, layouts
from sglang_live.extensions.planner.memory import memory_of
from sglang_live.extensions.planner.search import world_of
from sglang_live.extensions.planner.simulation.run import World

# Arrivals that may be refused. A fleet grows by servers until no more are.
_REFUSED = 0.001
_QUANTILES = np.linspace(0.005, 0.995, 100)
_ARM = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """
    users: sessions at once in the busiest ten minutes, one fleet each.
    layout: number of the layout of a server, in the order of sglang_live.extensions.planner.
    points: users of one server at which its turns are simulated; the last ones are too many.
    most: sessions that a server admits; within the target by sglang_live.extensions.planner.
    restart_s, days_between_failures: of a stage.
    """

    plan: PlanConfig
    users: tuple[int, ...]
    points: tuple[int, ...]
    most: int
    layout: int = 0
    restart_s: float = 67.0
    days_between_failures: float = 30.0
    repeats: int = 1
    json: Path | None = None
    picture: Path | None = field(default=None)

    def __post_init__(self) -> None:
        if min(*self.users, *self.points, self.most) < 1 or len(self.points) < 2:
            raise ValueError("--users, --points and --most are from 1 on, --points at least two")
        if list(self.points) != sorted(set(self.points)) or self.points[-1] < self.most:
            raise ValueError("--points rise, and the last one is at least --most")
        if min(self.restart_s, self.days_between_failures) <= 0 or self.repeats < 1:
            raise ValueError("--restart-s, --days-between-failures and --repeats are positive")

    @property
    def server(self) -> Layout:
        return layouts(24)[self.layout]


def quality_of(world: World, config: FleetConfig) -> Quality:
    """Simulates every turn of one server at each number of users."""
    audio_ms, continuous, rates = [], [], []
    for n_users in config.points:
        runs = [world.simulate(_ARM, n_users, repeat) for repeat in range(config.repeats)]
        records = [row.record for run in runs for row in run.rows]
        late_ms = [r.ttfp_after_detection_ms for r in records if r.ok]
        audio_ms.append(np.quantile([ms for ms in late_ms if ms is not None], _QUANTILES))
        whole = [r for r in records if r.ok and not (r.barged or r.cut_short)]
        continuous.append(sum(not r.gaps_over_100ms for r in whole) / len(whole))
        user_s = sum(run.wall_s for run in runs) * n_users
        rates.append(len(records) / user_s)
        _say(f"{n_users} users of one server: P90 {audio_ms[-1][89]:.0f} ms")
    return Quality(
        users=config.points,
        first_audio_ms=tuple(tuple(map(float, one)) for one in audio_ms),
        continuous=tuple(continuous),
        turns_per_s=tuple(rates),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The fleet for this number of users at once.

    price_per_talk_h: of an hour of a session, with the price of a GPU for an hour.
    """

    users: int
    n_servers: int
    n_gpus: int
    day: Day
    with_failures: Day
    price_per_talk_h: float | None


def grow(config: FleetConfig, quality: Quality, traffic: Traffic, users: int) -> Grown:
    """The smallest fleet that refuses no more than _REFUSED of a day's sessions."""
    session_s = 60 * config.plan.pattern.session_min
    per_day = users / traffic.busiest / session_s * DAY_S
    arrivals_s = traffic.arrivals_s(per_day, seed=users)

    def day(n_servers: int, between_s: float = math.inf) -> Day:
        spec = FleetSpec(
            n_servers=n_servers,
            most=config.most,
            session_s=session_s,
            between_failures_s=between_s,
            restart_s=config.restart_s,
        )
        return simulate_day(arrivals_s, spec, quality, seed=users)

    good = math.ceil(users / config.most)
    while day(good).refused > _REFUSED:
        good = math.ceil(1.05 * good)
    bad = max(1, math.floor(good / 1.05)) if good > 1 else 0
    while good - bad > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if day(middle).refused <= _REFUSED else (good, middle)
    found = day(good)
    n_gpus = good * config.server.n_gpus
    price = config.plan.price
    # Each of a server's three stages fails by itself.
    between_s = config.days_between_failures * DAY_S / 3
    return Grown(
        users=users,
        n_servers=good,
        n_gpus=n_gpus,
        day=found,
        with_failures=day(good, between_s),
        price_per_talk_h=None if price is None else price * n_gpus * 24 / found.talk_h,
    )


def table(grown: list[Grown]) -> str:
    lines = [
        "| users at the peak | servers | GPUs | users, mean | first audio P50 / P90 / P99, ms | "
        "continuous, % | refused, % | an hour of a session | with failures: failed turns, % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in grown:
        day = one.day
        shown = " / ".join(f"{ms:.0f}" for ms in day.first_audio_ms)
        price = "" if one.price_per_talk_h is None else f"{one.price_per_talk_h:.3f}"
        lines.append(
            f"| {one.users:,} | {one.n_servers} | {one.n_gpus} | {day.users_mean:.0f} | {shown} | "
            f"{100 * day.continuous:.2f} | {100 * day.refused:.2f} | {price} | "
            f"{100 * one.with_failures.failed:.3f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    plan = config.plan
    memory = memory_of(config.server.placement, plan.gpu.free_gib, plan.sizes, plan.model)
    quality = quality_of(world_of(plan, config.server, memory), config)
    traffic = Traffic.load()
    grown = []
    for users in config.users:
        grown.append(grow(config, quality, traffic, users))
        _say(f"{users} users: {grown[-1].n_servers} servers")
    print(f"Simulated, modelled device: {plan.model.name}; servers: {config.server.name}")
    print(table(grown))
    _write(config, quality, grown)
    if config.picture is not None:
        draw(grown, plan.model.name, config.picture)
    return 0


def draw(grown: list[Grown], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    users = [one.users for one in grown]
    curves = (
        ("price of an hour of a session", [one.price_per_talk_h or 0 for one in grown]),
        ("P90 of first audio, ms", [one.day.first_audio_ms[1] for one in grown]),
        ("users at the peak per GPU", [one.users / one.n_gpus for one in grown]),
    )
    figure, axes = pyplot.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.2))
    for axis, (name, values) in zip(axes, curves, strict=True):
        axis.plot(users, values, marker="o", ms=3)
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_title(name, fontsize=8)
        axis.set_xlabel("users at the peak", fontsize=8)
    figure.suptitle(f"Simulated days, modelled device: {title}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _write(config: FleetConfig, quality: Quality, grown: list[Grown]) -> None:
    if config.json is None:
        return
    known = facts(config.plan.gpu.device_model)
    known["device"] = f"simulated: {config.plan.model.name}"
    document: dict[str, Any] = {
        "benchmark": "fleet",
        **known,
        "config": {
            "layout": config.server.name,
            "most": config.most,
            "restart_s": config.restart_s,
            "days_between_failures": config.days_between_failures,
            "pattern": asdict(config.plan.pattern),
            "price": config.plan.price,
        },
        "quality": [
            {
                "users": users,
                "first_audio_p50_p90_p99_ms": [round(audio_ms[at]) for at in (49, 89, 98)],
                "continuous": round(continuous, 4),
                "turns_per_s": round(rate, 4),
            }
            for users, audio_ms, continuous, rate in zip(
                quality.users,
                quality.first_audio_ms,
                quality.continuous,
                quality.turns_per_s,
                strict=True,
            )
        ],
        "fleets": [asdict(one) for one in grown],
    }
    config.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    _say(f"wrote {config.json}")


def parse_args(argv: list[str] | None = None) -> FleetConfig:
    """Other flags are those of sglang_live.extensions.planner."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.simulate.fleet", allow_abbrev=False)
    add = parser.add_argument
    add("--users", type=_numbers, default=(100, 300, 1000, 3000), metavar="N,N")
    add("--points", type=_numbers, default=(8, 16, 24, 32, 40, 48, 56), metavar="N,N")
    add("--most", type=int, default=40, metavar="N", help="sessions that a server admits")
    add(
        "--layout",
        type=int,
        default=0,
        choices=range(5),
        help="as the planner lists them",
    )
    add("--restart-s", type=float, default=67.0, metavar="S")
    add("--days-between-failures", type=float, default=30.0, metavar="D", help="of one stage")
    add("--repeats", type=int, default=1, help="seeds of the simulated turns")
    add("--json", type=Path, metavar="FILE")
    add("--picture", type=Path, metavar="FILE", help="draw the curves (matplotlib)")
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
