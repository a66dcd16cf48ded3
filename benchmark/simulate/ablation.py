"""What each rule and constant of the policies is worth: left out one at a time, on a modelled GPU.

    python -m benchmark.simulate.ablation --json FILE

Loads: users whose responses are interrupted half the time, on a quiet host, on one that pauses,
and beside sessions that send a minute of audio at once. A rule that moves none of the figures by
more than the seeds do is a candidate for deletion; some serve loads that are not among these (a
full pool, thousands of streams).
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmark.load.provenance import facts
from benchmark.load.tables import aligned
from sglang_live.extensions.planner.device_model.model import H100, load_device_model
from sglang_live.extensions.planner.simulation.load.storm import StormSpec
from sglang_live.extensions.planner.simulation.noise import Noise
from sglang_live.extensions.planner.simulation.run import World, point_of
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.extensions.planner.simulation.users import UserSettings
from sglang_live.extensions.planner.simulation.workload import Workload
from sglang_live.policy.config import TALKER, THINKER

ALL = "urgency+pacing+truncate+preheat+arbiter"
# Nearly nothing, where a constant may not be zero.
_NONE = 1e-6


@dataclass(frozen=True, slots=True)
class LeftOut:
    """changes: of constants in both engines. arm: other policies."""

    changes: dict[str, Any] = field(default_factory=dict)
    arm: str = ALL


RULES = {
    "nothing": LeftOut(),
    "turns": LeftOut(arm="urgency+pacing+truncate+preheat"),
    "pacing": LeftOut(arm="urgency+truncate+preheat+arbiter"),
    "urgency": LeftOut(arm="pacing+truncate+preheat+arbiter"),
    "preheat": LeftOut(arm="urgency+pacing+truncate+arbiter"),
    "truncate": LeftOut(arm="urgency+pacing+preheat+arbiter"),
    "deferred prefills": LeftOut(
        {"prefill.max_defer_s": _NONE, "prefill.max_defer_unheard_s": _NONE}
    ),
    "short prefills at once": LeftOut({"prefill.short_rounds": _NONE}),
    "prefills together": LeftOut({"prefill.unnoticed_s": _NONE}),
    "least share of prefills": LeftOut({"prefill.min_share": _NONE}),
    "slices of prefills": LeftOut({"stage.may_pause_prefill": False}),
    "cost of flips": LeftOut({"pacing.flip_s": 0.0}),
    "ease": LeftOut({"arbiter.ease_s": 0.0}),
}


@dataclass(frozen=True, slots=True)
class Load:
    users: int
    noise: Noise | None = None
    storm: StormSpec | None = None


LOADS = {
    "quiet, 61": Load(61),
    "quiet, 88": Load(88),
    "quiet, 99": Load(99),
    "pauses, 61": Load(61, noise=Noise(2.0)),
    "storm, 48": Load(48, storm=StormSpec.parse("4:4:60")),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """p90_ms: least and largest of the seeds beside that of all. Shares from 0 to 1."""

    p90_ms: float | None
    p90_by_seed_ms: tuple[float | None, float | None]
    continuity: float | None
    waste: float | None
    useful_turns_per_s: float


def figures(rule: LeftOut, load: Load, seeds: int) -> Figures:
    spec = ServerSpec(
        model=load_device_model(H100),
        talker_policy=TALKER.changed(rule.changes),
        thinker_policy=THINKER.changed(rule.changes),
    )
    workload = Workload.load(turns=6, barge_in=0.5, seed=1)
    world = World(workload, spec, UserSettings(), load.storm, load.noise)
    runs = [world.simulate(rule.arm, load.users, seed) for seed in range(seeds)]
    whole = point_of(rule.arm, load.users, runs)
    p90s = [
        point_of(rule.arm, load.users, [run]).ttfp_after_detection_ms.p90 or 0.0 for run in runs
    ]
    return Figures(
        whole.ttfp_after_detection_ms.p90,
        (min(p90s), max(p90s)),
        whole.continuity,
        whole.waste,
        whole.useful_turns_per_s,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.simulate.ablation", description="One rule left out at a time."
    )
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    found: dict[str, dict[str, Figures]] = {}
    for name, rule in RULES.items():
        found[name] = {where: figures(rule, load, args.seeds) for where, load in LOADS.items()}
        print(f"without {name}", file=sys.stderr, flush=True)
    rows = [("left out", *LOADS)]
    rows += [(name, *map(_text, by_load.values())) for name, by_load in found.items()]
    print("P90 ms / continuous % / waste % / useful turns/s; modelled H100\n" + aligned(rows))
    if args.json is not None:
        document = {
            "benchmark": "simulate.ablation",
            **facts(H100),
            "loads": {name: asdict(load) for name, load in LOADS.items()},
            "left_out": {name: asdict(rule) for name, rule in RULES.items()},
            "figures": {n: {w: asdict(f) for w, f in one.items()} for n, one in found.items()},
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


def _text(one: Figures) -> str:
    def percent(share: float | None) -> str:
        return "n/a" if share is None else f"{100 * share:.1f}"

    p90 = "n/a" if one.p90_ms is None else f"{one.p90_ms:.0f}"
    useful = f"{one.useful_turns_per_s:.2f}"
    return f"{p90} / {percent(one.continuity)} / {percent(one.waste)} / {useful}"


if __name__ == "__main__":
    sys.exit(main())
