"""How far the gain of `all` over the best baseline rests on the estimates of a device model.

    python -m benchmark.simulate.sensitivity --json FILE --picture FILE

Each estimated constant, and the time of a launch, is halved and doubled by itself.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmark.load.provenance import facts
from benchmark.simulate.gains import Gain, Measured, gain
from sglang_live.extensions.planner.device_model.model import H100, load_device_model
from sglang_live.extensions.planner.simulation.run import World, point_of
from sglang_live.extensions.planner.simulation.spec import HostTimes, ServerSpec
from sglang_live.extensions.planner.simulation.users import UserSettings
from sglang_live.extensions.planner.simulation.workload import Workload

ARM = "all"
# The best everywhere: benchmark.simulate has the others.
BASELINES = ("stock+no-overlap", "truncate+preheat+no-overlap")
LAUNCH = "host.launch_s"


@dataclass(frozen=True, slots=True)
class Found:
    """changed: factor of the constant. gain: None without a P90."""

    constant: str
    changed: float
    gain: Gain | None


def variants(path: Path) -> Iterator[tuple[str, float, ServerSpec]]:
    """The model as it is, then each estimate halved and doubled. Links are left out: no KV is on
    the host."""
    model = load_device_model(path)
    yield "none", 1.0, ServerSpec(model=model)
    for name in (*(n for n in model.estimates if not n.startswith("link.")), LAUNCH):
        section, _, field = name.partition(".")
        for factor in (0.5, 2.0):
            if name == LAUNCH:
                host = HostTimes(launch_s=factor * HostTimes().launch_s)
                yield name, factor, ServerSpec(model=model, host=host)
                continue
            costs = getattr(model, section)
            other = replace(costs, **{field: factor * getattr(costs, field)})
            yield name, factor, ServerSpec(model=replace(model, **{section: other}))


def gain_of(spec: ServerSpec, users: int, seeds: int) -> Gain | None:
    world = World(Workload.load(turns=6, barge_in=0.5, seed=1), spec, UserSettings())

    def measured(arm: str) -> Measured:
        runs = [world.simulate(arm, users, seed) for seed in range(seeds)]
        return Measured(
            point_of(arm, users, runs), tuple(point_of(arm, users, [run]) for run in runs)
        )

    return gain(measured(ARM), [measured(arm) for arm in BASELINES])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.simulate.sensitivity", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device-model", type=Path, default=H100, metavar="FILE")
    parser.add_argument("--users", type=int, default=76, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them (matplotlib)")
    args = parser.parse_args(argv)
    found = []
    with ProcessPoolExecutor(args.processes) as pool:
        runs = [
            (constant, factor, pool.submit(gain_of, spec, args.users, args.seeds))
            for constant, factor, spec in variants(args.device_model)
        ]
        for constant, factor, run in runs:
            found.append(Found(constant, factor, run.result()))
            print(_line(found[-1]), flush=True)
    if args.json is not None:
        document = {
            "benchmark": "simulate.sensitivity",
            **facts(args.device_model),
            "users": args.users,
            "seeds": args.seeds,
            "found": [asdict(one) for one in found],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    if args.picture is not None:
        _draw(found, args.users, args.picture)
    return 0


def _line(one: Found) -> str:
    name = f"{one.constant} x{one.changed:g}"
    if one.gain is None:
        return f"{name:45} no P90"
    mean, least, most = one.gain.earlier
    return (
        f"{name:45} {one.gain.p90_from_ms:.0f} to {one.gain.p90_ms:.0f} ms, {mean:.2f} times "
        f"sooner ({least:.2f} to {most:.2f}); continuity {100 * one.gain.continuity:+.1f}"
    )


def _draw(found: list[Found], users: int, path: Path) -> None:
    """A bar for each constant, from the gain with half of it to that with twice of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = {(one.constant, one.changed): one.gain for one in found}
    names = list(dict.fromkeys(one.constant for one in found if one.changed != 1.0))
    figure, axis = pyplot.subplots(figsize=(7.5, 0.5 * len(names) + 1.2))
    for row, name in enumerate(names):
        ends = [g.earlier[0] for f in (0.5, 2.0) if (g := known[name, f]) is not None]
        axis.plot(ends, [row] * len(ends), color="tab:blue", linewidth=5, alpha=0.5)
        for factor, end in zip(("½", "2"), ends, strict=False):
            axis.annotate(factor, (end, row), ha="center", va="center", fontsize=8)
    if (as_it_is := known["none", 1.0]) is not None:
        axis.axvline(as_it_is.earlier[0], color="black", linewidth=0.8)
    axis.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlabel(
        f"P90 of the best baseline over that of all policies, {users} users", fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
