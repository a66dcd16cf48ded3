"""Admission on a modelled device: the capacity that it finds, beside that found by brute force.

    python -m benchmark.simulate.admission --gpu h200 --seconds 900

First the most users within the target who begin at once, each number of them simulated. Then an
open system, with twice as many arrivals as that serves: sessions come, stay for some turns and
leave, and who is refused does not return. Beside admission a constant limit on sessions, the
highest within the target: what admission could find at most. Then storms: beside some users, as
many as would fill the server arrive at once, again and again.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmark.load.provenance import facts
from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.config import PlanConfig
from sglang_live.extensions.planner.config import parse_args as parse_plan
from sglang_live.extensions.planner.layouts import layouts
from sglang_live.extensions.planner.memory import memory_of
from sglang_live.extensions.planner.search import world_of
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.frontier import capacity
from sglang_live.extensions.planner.simulation.load.arrivals import UserPlan
from sglang_live.extensions.planner.simulation.load.rows import TurnRow
from sglang_live.extensions.planner.simulation.load.stats import PointStats, RunTotals, point_stats
from sglang_live.extensions.planner.simulation.run import ADMITTED, Arm, World, point_of
from sglang_live.extensions.planner.simulation.server.server import Server
from sglang_live.extensions.planner.simulation.users import User
from sglang_live.extensions.planner.simulation.workload import NEW

# The last share of the time, which is judged, and the time between two looks at the sessions.
_SETTLED_SHARE, _LOOK_S = 0.4, 1.0
# Of an open system's arrivals, over what the server serves. Of storms: the users beside them, as a
# share of the capacity, the time from one to the next, and the turns of its users, who have left
# before the next.
_OFFERED, _BESIDE, _STORM_EVERY_S, _STORM_TURNS = 2.0, 0.6, 90.0, 3
_MOST_SESSIONS = 1024

# When each session comes, and its turns.
Arrivals = list[tuple[float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """
    layout: number of the layout, in the order of sglang_live.extensions.planner.
    seconds: simulated time of each open system.
    turns: of a session.
    storm: users that arrive at once, as a share of the capacity.
    served: the capacity, if it is known; None: it is searched.
    """

    plan: PlanConfig
    layout: int = 0
    seconds: float = 900.0
    turns: int = 10
    storm: float = 1.0
    seeds: int = 2
    served: int | None = None
    loads: tuple[str, ...] = ("steady", "storms")
    json: Path | None = None

    def __post_init__(self) -> None:
        if not set(self.loads) <= LOADS.keys():
            raise ValueError("--load is steady or storms")
        if min(self.seconds, self.turns, self.storm) <= 0 or self.seeds < 1:
            raise ValueError("--seconds, --turns, --storm and --seeds are positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """An open system's settled time, all seeds.

    users, users_most: sessions at once, on average and at most. limit: of admission, on average.
    """

    arm: str
    users: float
    users_most: int
    limit: float
    refused: float
    p90_ms: float
    continuous: float


class Experiment:
    def __init__(self, config: AdmissionConfig):
        plan, layout = config.plan, layouts(24)[config.layout]
        memory = memory_of(layout.placement, plan.gpu.free_gib, plan.sizes, plan.model)
        self._config, self.plan = config, plan
        world = world_of(plan, layout, memory)
        # Sessions begin when their users come, not in the middle of a conversation.
        self._world = World(world.workload, world.server, replace(world.settings, longest=NEW))
        self.layout = layout.name
        self._session_s = config.turns * plan.pattern.turn_s

    def brute_force(self) -> int:
        def measure(arm: str, n_users: int) -> PointStats:
            repeats = range(max(1, math.ceil(120 / n_users)))
            return point_of(
                arm, n_users, [self._world.simulate(arm, n_users, repeat) for repeat in repeats]
            )

        return capacity(measure, "all", 16, slo=self.plan.slo).users

    def steady(self, arm: str, n_star: int, most: int = _MOST_SESSIONS) -> Open:
        """Arrivals of a Poisson process, at _OFFERED times what n_star users are.

        Args:
            most: sessions that the server takes.
        """
        rate = _OFFERED * n_star / self._session_s

        def arrivals(rng: np.random.Generator) -> Arrivals:
            n_arrivals = rng.poisson(rate * self._config.seconds)
            starts_s = np.sort(rng.uniform(0, self._config.seconds, n_arrivals))
            return [(at_s, self._config.turns) for at_s in starts_s.tolist()]

        return self._open(arm, arrivals, most)

    def constant_limit(self, n_star: int) -> Open:
        """The same with the highest constant limit within the target, by bisection.

        Half of those who may begin at once are taken to be within it, and all who come not.
        """
        within, beyond = n_star // 2, math.ceil(_OFFERED * n_star)
        best = self.steady("all", n_star, within)
        while beyond - within > 1:
            most = (within + beyond) // 2
            found = self.steady("all", n_star, most)
            if self._is_within_target(found):
                within, best = most, found
            else:
                beyond = most
        return replace(best, arm="constant limit")

    def _is_within_target(self, found: Open) -> bool:
        slo = self.plan.slo
        return found.p90_ms <= slo.first_audio_ms and found.continuous >= slo.continuous

    def storms(self, arm: str, n_star: int) -> Open:
        """_BESIDE of n_star users, and storms."""
        seconds, rate = self._config.seconds, _BESIDE * n_star / self._session_s

        def arrivals(rng: np.random.Generator) -> Arrivals:
            beside_s = rng.uniform(0, seconds, rng.poisson(rate * seconds))
            storms_s = np.arange(_STORM_EVERY_S, seconds, _STORM_EVERY_S)
            at_once_s = np.repeat(storms_s, round(self._config.storm * n_star))
            # People do not click in the same millisecond.
            at_once_s = at_once_s + rng.uniform(0, 2.0, len(at_once_s))
            return sorted(
                [(at_s, self._config.turns) for at_s in beside_s.tolist()]
                + [(at_s, _STORM_TURNS) for at_s in at_once_s.tolist()]
            )

        return self._open(arm, arrivals)

    def _open(
        self,
        arm: str,
        arrivals: Callable[[np.random.Generator], Arrivals],
        most: int = _MOST_SESSIONS,
    ) -> Open:
        rows: list[TurnRow] = []
        looks: list[tuple[int, int]] = []
        for seed in range(self._config.seeds):
            found, own = self._run(arm, arrivals(np.random.default_rng([seed, 7])), seed, most)
            rows += found
            looks += own
        point = point_stats(
            arm,
            0,
            [row.record for row in rows if row.record.status != "refused"],
            [RunTotals(wall_s=1.0, cpu_s=0.0, peak_rss_mib=0.0, late_frames=0.0)],
        )
        first = [row for row in rows if row.turn == 0]
        return Open(
            arm=arm,
            users=float(np.mean([n for n, _ in looks])),
            users_most=max(n for n, _ in looks),
            limit=float(np.mean([limit for _, limit in looks])),
            refused=sum(row.record.status == "refused" for row in first) / max(1, len(first)),
            p90_ms=point.ttfp_after_detection_ms.p90 or math.nan,
            continuous=point.continuity or math.nan,
        )

    def _run(
        self, arm: str, arrivals: Arrivals, seed: int, most: int
    ) -> tuple[list[TurnRow], list[tuple[int, int]]]:
        """Rows and (sessions, limit) of the settled time."""
        events = Events()
        spec = replace(
            self._world.server,
            max_sessions=most,
            first_audio_s=self.plan.slo.first_audio_ms / 1000,
        )
        server = Server(spec, Arm.parse(arm).policies, events)
        n_turns = max(self._config.turns, _STORM_TURNS)
        workload = replace(self._world.workload, turns=n_turns)
        settings = replace(self._world.settings, returns=False)
        plans: Sequence[UserPlan] = [
            _begun(plan, start_s, n_turns)
            for plan, (start_s, n_turns) in zip(
                workload.plans(len(arrivals), seed), arrivals, strict=True
            )
        ]
        users = [User(plan, workload.clips, server, settings) for plan in plans]
        settled_s = (1 - _SETTLED_SHARE) * self._config.seconds
        looks: list[tuple[int, int]] = []

        def look() -> None:
            now = server.capacity.report()
            looks.append((now.n_sessions, now.limit))

        for at_s in np.arange(settled_s, self._config.seconds, _LOOK_S):
            events.at(float(at_s), look)
        server.run(until_s=self._config.seconds)
        server.end()
        rows = [row for user in users for row in user.rows if row.start_s >= settled_s]
        return [row for row in rows if row.record.status != "unstopped"], looks


def _begun(plan: UserPlan, start_s: float, n_turns: int) -> UserPlan:
    # The last turn has no successor that could interrupt it.
    turns = (*plan.turns[: n_turns - 1], replace(plan.turns[n_turns - 1], interruption=None))
    return replace(plan, start_s=start_s, turns=turns)


LOADS = {"steady": Experiment.steady, "storms": Experiment.storms}
ARMS = {"steady": (ADMITTED,), "storms": ("off", "all", ADMITTED)}


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    experiment = Experiment(config)
    n_star = config.served or experiment.brute_force()
    print(f"Simulated, modelled device: {config.plan.model.name}; {experiment.layout}")
    print(f"within the target if all begin at once: {n_star} users")
    found = {
        load: [LOADS[load](experiment, arm, n_star) for arm in ARMS[load]] for load in config.loads
    }
    if "steady" in found:
        found["steady"].insert(0, experiment.constant_limit(n_star))
    print("| load | arm | sessions, mean / most | limit | refused, % | P90, ms | continuous, % |")
    print("|---|---|---|---|---|---|---|")
    for load, rows in found.items():
        for one in rows:
            print(
                f"| {load} | `{one.arm}` | {one.users:.1f} / {one.users_most} | {one.limit:.1f} | "
                f"{100 * one.refused:.0f} | {one.p90_ms:.0f} | {100 * one.continuous:.2f} |"
            )
    if config.json is not None:
        known = facts(config.plan.gpu.device_model)
        known["device"] = f"simulated: {config.plan.model.name}"
        document = {
            "benchmark": "simulated_admission",
            **known,
            "config": {
                "layout": experiment.layout,
                "seconds": config.seconds,
                "turns": config.turns,
                "storm": config.storm,
                "seeds": config.seeds,
                "target": asdict(config.plan.slo),
                "pattern": asdict(config.plan.pattern),
            },
            "brute_force": n_star,
            **{load: [asdict(one) for one in rows] for load, rows in found.items()},
        }
        config.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


def parse_args(argv: list[str] | None = None) -> AdmissionConfig:
    """Other flags are those of sglang_live.extensions.planner."""
    prog = "python -m benchmark.simulate.admission"
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--layout",
        type=int,
        default=0,
        choices=range(5),
        help="as the planner lists them",
    )
    add("--seconds", type=float, default=900.0, metavar="S")
    add("--turns", type=int, default=10, metavar="N", help="of a session")
    add("--storm", type=float, default=1.0, metavar="X", help="of the capacity, at once")
    add("--seeds", type=int, default=2, metavar="N")
    add("--load", dest="loads", type=lambda name: (name,), default=("steady", "storms"))
    add("--served", type=int, metavar="N", help="the capacity, if it is known")
    add("--json", type=Path, metavar="FILE")
    own, rest = parser.parse_known_args(argv)
    try:
        return AdmissionConfig(plan=parse_plan(rest), **vars(own))
    except (ValueError, BadInputError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
