"""Voice sessions on a modelled device, simulated with the server's own policies.

    python -m benchmark.simulate --policies stock,stock+no-overlap,all --sessions 32,64
    python -m benchmark.simulate --frontier --json out.json --picture out.png
    python -m benchmark.simulate --against benchmark/results/voice_load/….json

The users are those of voice_load, and so are the tables. Every number is one of a simulation of a
modelled device: see benchmark/notes/simulation.md. Arms are policies joined by +, `stock`, which is
SGLang with clients that send the whole conversation, and either with +no-overlap.
"""

import json
import re
import sys
import time
from dataclasses import asdict, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any

from benchmark.load.provenance import ROOT, facts
from benchmark.load.tables import interruption_table, percent, storm_table, table
from benchmark.simulate import against, picture
from benchmark.simulate.config import SimulateConfig, parse_args
from benchmark.simulate.gains import Gain, Measured, bounds, gain, gains_table
from sglang_live.extensions.planner.simulation.frontier import Capacity, capacity
from sglang_live.extensions.planner.simulation.load.stats import PointStats
from sglang_live.extensions.planner.simulation.run import World, point_of

# The search begins with it: runs of few users tell little.
_LEAST_USERS = 32


class Loads:
    """Points of one load, each simulated once, with all seeds."""

    def __init__(self, config: SimulateConfig, barge_in: float):
        self.config, self.barge_in = config, barge_in
        self._workload = config.workload(barge_in)
        self._known: dict[tuple[str, int], Measured] = {}
        self.kv: dict[str, dict[str, int]] = {}

    def point(self, arm: str, n_users: int) -> PointStats:
        return self.measured(arm, n_users).whole

    def measured(self, arm: str, n_users: int) -> Measured:
        key = arm, n_users
        if key not in self._known:
            self._known[key] = self._measure(arm, n_users)
        return self._known[key]

    @cached_property
    def capacities(self) -> dict[str, Capacity]:
        """What each arm serves within the SLO."""
        return {arm: capacity(self.point, arm, _LEAST_USERS) for arm in self.config.policies}

    @cached_property
    def sessions(self) -> tuple[int, ...]:
        """Those of --sessions, or of --of-knee."""
        if not (shares := self.config.of_knee):
            return self.config.sessions
        knee = max(self.capacities[arm].users for arm in self.config.baselines)
        return tuple(max(1, round(share * knee)) for share in shares)

    def points(self) -> list[PointStats]:
        arms = self.config.policies
        return [self.point(arm, n) for n in self.sessions for arm in arms]

    def gains(self) -> list[tuple[PointStats, Gain]]:
        """Of each arm with policies about rounds, beside the best of the others."""
        arms, baselines = self.config.policies, self.config.baselines
        found = []
        for n in self.sessions:
            beside = [self.measured(arm, n) for arm in baselines]
            for arm in (arm for arm in arms if arm not in baselines):
                one = self.measured(arm, n)
                if (gained := gain(one, beside)) is not None:
                    found.append((one.whole, gained))
        return found

    def _measure(self, arm: str, n_users: int) -> Measured:
        began_s = time.perf_counter()
        repeats = range(self.config.repeats)
        server = self.config.server
        if arm in self.config.baselines:  # SGLang alone begins no turn before it is known to be one
            server = replace(server, speculate_ms=None)
        world = World(
            self._workload, server, self.config.users, self.config.storm, self.config.noise
        )
        runs = [world.simulate(arm, n_users, repeat) for repeat in repeats]
        self.kv[f"{arm} {n_users}"] = runs[-1].most_used
        spent_s = time.perf_counter() - began_s
        _say(f"barge-in {self.barge_in:g}, {arm}, {n_users} users: {spent_s:.1f} s")
        by_seed = tuple(point_of(arm, n_users, [run]) for run in runs)
        busy = fmean(run.busy for run in runs)
        return Measured(point_of(arm, n_users, runs), by_seed, busy)


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    if config.against is not None:
        found = against.compare(json.loads(config.against.read_text("utf-8")))
        print(against.table(found))
        _write(config, {"against": config.against.name, "rows": [_row(one) for one in found]})
        return 0
    loads = {barge_in: Loads(config, barge_in) for barge_in in config.barge_in}
    documents = [_report(config, one) for one in loads.values()]
    _write(config, {"loads": documents})
    if config.picture is not None:
        name = config.server.model.name
        picture.draw({p: one.points() for p, one in loads.items()}, name, config.picture)
    return 0


def _report(config: SimulateConfig, loads: Loads) -> dict[str, Any]:
    points = loads.points()
    print(f"\nSimulated, modelled device: {config.server.model.name}; barge-in {loads.barge_in:g}")
    print(table(points))
    for make in (interruption_table, storm_table):
        if (text := make(points)) is not None:
            print("\n" + text)
    gained = loads.gains()
    if gained:
        print("\n" + gains_table([point for point, _ in gained], [one for _, one in gained]))
    document: dict[str, Any] = {
        "barge_in": loads.barge_in,
        "points": [_point(point) for point in points],
        "beside_best_baseline": [
            {"policies": point.policies, "sessions": point.sessions, **_rounded(asdict(one))}
            for point, one in gained
        ],
        "most_kv_tokens": {place: used["thinker"] for place, used in loads.kv.items()},
    }
    if config.frontier:
        document |= _search(loads)
    return document


def _search(loads: Loads) -> dict[str, Any]:
    print()
    documents = {}
    for arm, one in loads.capacities.items():
        print(f"{arm:>24}: {one.users} users within the SLO; at {one.fails_at}: {one.why}")
        bound = bounds(partial(loads.measured, arm), one.users) if one.users else None
        documents[arm] = asdict(one) | {"bounds": bound and _rounded(asdict(bound))}
        if bound is not None:
            print(
                f"{'':>24}  P90 with {bound.at} is {bound.times_alone:.2f} times that of a user "
                f"alone, {bound.alone_ms:.0f} ms; the device is busy for {percent(bound.busy)} of "
                f"the time with {one.users}"
            )
    return {"capacity": documents}


# What a load on a machine has beside: its processes and clients.
_NOT_SIMULATED = (
    *("cpu_s_per_audio_s", "peak_rss_mib", "late_frames", "rate_rps"),
    *("early_replies", "false_triggers", "wrong_interruptions", "side_errors"),
)


def _point(point: PointStats) -> dict[str, Any]:
    found = {name: value for name, value in asdict(point).items() if name not in _NOT_SIMULATED}
    if point.storm is None:
        del found["storm"]
    return {name: _rounded(value) for name, value in found.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    return round(value, 4) if isinstance(value, float) else value


_POINT = re.compile(r'\{\s+"policies": "(?:[^{}]|\{[^{}]*\})*\}')


def _row(one: against.Compared) -> dict[str, Any]:
    return {**asdict(one), "agrees": one.agrees}


def _write(config: SimulateConfig, found: dict[str, Any]) -> None:
    if config.json is None:
        return
    known = facts(config.device_model)
    known["device"] = f"simulated: {config.server.model.name}"
    settings = {
        name: _plain(value)
        for name, value in asdict(config).items()
        if name not in ("json", "picture")
    }
    document = {"benchmark": "simulate", **known, "config": settings, **found}
    # One line for each point.
    text = json.dumps(document, indent=1)
    config.json.write_text(
        _POINT.sub(lambda found: " ".join(found[0].split()), text) + "\n", "utf-8"
    )
    _say(f"wrote {config.json}")


def _plain(value: Any) -> Any:
    text = str(value)
    if text.startswith(f"{ROOT}/"):
        return text.removeprefix(f"{ROOT}/")
    return value if isinstance(value, int | float | bool | tuple | None) else text


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
