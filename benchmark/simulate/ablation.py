"""What each rule and constant of the policies is worth: left out one at a time, on a modelled GPU.

    python -m benchmark.simulate.ablation --json FILE

Loads: users whose responses are interrupted half the time, at the knee of all policies on a quiet
host, fewer on one that pauses, and beside sessions that send a minute of audio at once. Rules for
long prompts are left out where users bring a conversation. A rule that moves none of the figures by
more than the seeds do is a candidate for deletion; some serve a full pool, which is not among these
loads.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
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
from sglang_live.extensions.planner.simulation.workload import History, Workload
from sglang_live.policy.config import TALKER, THINKER

ALL = "urgency+pacing+truncate+preheat+arbiter"
# Nearly nothing, where a constant may not be zero.
_NONE = 1e-6
_LONG = 1e6


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
    "deferred prefills": LeftOut({"prefill.max_defer_s": _NONE}),
    "short prefills at once": LeftOut({"prefill.short_rounds": _NONE}),
    "prefills together": LeftOut({"prefill.unnoticed_s": _NONE}),
    "least share of prefills": LeftOut({"prefill.min_share": _NONE}),
    "slices of prefills": LeftOut({"stage.may_pause_prefill": False}),
    "ease": LeftOut({"arbiter.ease_s": 0.0}),
    "first sounds sooner": LeftOut({"arbiter.first_sound_s": 0.5}),
    "unheard work in time": LeftOut({"arbiter.unheard_s": _LONG}),
    "cost of what is deferred": LeftOut({"prefill.defer_costs": _LONG}),
    "end of a pause": LeftOut({"pacing.max_pause_s": _LONG}),
    "waiting in time": LeftOut({"admission.max_wait_s": _LONG}),
    "shorter prompts first": LeftOut({"slicing.max_preempt_s": _NONE}),
    "(with startup-delay)": LeftOut(arm=f"{ALL}+startup-delay"),
}


# Where a rule can matter: a run of the server's orchestrator is dear.
_AT_THE_KNEE = (
    *("turns", "pacing", "preheat", "truncate", "deferred prefills", "short prefills at once"),
    *("prefills together", "least share of prefills", "ease"),
    *("first sounds sooner", "cost of what is deferred", "end of a pause"),
)
_BESIDE_LONG_MESSAGES = (
    *("urgency", "deferred prefills", "short prefills at once", "prefills together"),
    *("least share of prefills", "slices of prefills", "ease", "unheard work in time"),
    "waiting in time",
)
_OF_LONG_PROMPTS = ("deferred prefills", "slices of prefills", "shorter prompts first")
_ON_A_NOISY_HOST = ("turns", "pacing", "deferred prefills", "ease", "(with startup-delay)")


@dataclass(frozen=True, slots=True)
class Load:
    """history_tokens: at most, of a conversation that a user brings, as they arrive in a minute.
    rules: that are left out there.
    """

    users: int
    rules: tuple[str, ...]
    noise: Noise | None = None
    storm: StormSpec | None = None
    history_tokens: int = 0


LOADS = {
    "quiet, 84": Load(84, _AT_THE_KNEE),
    "pauses, 61": Load(61, _ON_A_NOISY_HOST, noise=Noise(2.0)),
    "storm, 48": Load(48, _BESIDE_LONG_MESSAGES, storm=StormSpec.parse("4:4:60")),
    "long prompts, 96": Load(96, _OF_LONG_PROMPTS, history_tokens=8000),
    "longer prompts, 24": Load(24, _OF_LONG_PROMPTS, history_tokens=32_000),
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
    workload = Workload.load(turns=4, barge_in=0.5, seed=1)
    settings = UserSettings(longest=History(load.history_tokens, 0, has_kv=False))
    if load.history_tokens:
        spec = replace(spec, thinker_tokens=1_000_000)
        workload = replace(workload, turns=2, arrive_s=60.0)
    world = World(workload, spec, settings, load.storm, load.noise)
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
    parser.add_argument("--seeds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    found: dict[str, dict[str, Figures]] = {name: {} for name in RULES}
    cells = [(n, w) for n in RULES for w, load in LOADS.items() if n in ("nothing", *load.rules)]
    with ProcessPoolExecutor(args.processes) as pool:
        runs = [(n, w, pool.submit(figures, RULES[n], LOADS[w], args.seeds)) for n, w in cells]
        for name, where, run in runs:
            found[name][where] = run.result()
            line = f"{where}, without {name}: {_text(found[name][where])}"
            print(line, file=sys.stderr, flush=True)
    rows = [("left out", *LOADS)]
    rows += [(n, *(_text(one[w]) if w in one else "" for w in LOADS)) for n, one in found.items()]
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
