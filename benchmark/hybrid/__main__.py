"""Speech and best-effort work in one engine, simulated: stock SGLang, the paper, and the policies.

    python -m benchmark.hybrid --json out.json

One thinker on a modelled GPU. Turns come in the bursts of a real service, with its lengths; beside
them there is always best-effort work. All arms get the same turns and work. The load is a share of
the capacity: the most turns per second of which the live policies, without best-effort work, serve
99 % within the objectives; it is searched on `tune`, and the arms run on `held_out`.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.hybrid.arms import ARMS
from benchmark.hybrid.engine import EngineSize
from benchmark.hybrid.idle_share import needed_share
from benchmark.hybrid.listeners import LEAD_S, TPOT_S, TTFT_S
from benchmark.hybrid.report import ALONE, LIVE_ALONE, STOCK_ALONE, line, summary
from benchmark.hybrid.run import Run, RunConfig, run
from benchmark.hybrid.workload import KINDS, SERVICES, Workload
from benchmark.load.provenance import config_of, facts
from sglang_live.extensions.planner.device_model.costs import ThinkerCosts
from sglang_live.extensions.planner.device_model.model import H100, load_device_model

_ATTAINED = 0.99
_SEARCH_STEPS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    gpu: str = "h200"
    kind: str = "voice"
    best_effort: str = "code"
    loads: tuple[float, ...] = (0.5, 0.8, 1.0)
    seconds: float = 180.0
    seeds: tuple[int, ...] = (1, 2, 3)
    in_flight: int = 256
    pool_tokens: int = 400_000
    chunk_tokens: int = 8192
    arms: tuple[str, ...] = ARMS
    json: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    options: Options
    costs: ThinkerCosts

    def run(self, arm: str, workload: Workload, per_s: float, n_in_flight: int, seed: int) -> Run:
        size = EngineSize(
            pool_tokens=self.options.pool_tokens, chunk_tokens=self.options.chunk_tokens
        )
        config = RunConfig(
            arm=arm,
            per_s=per_s,
            n_best_effort=n_in_flight,
            duration_s=self.options.seconds,
            seed=seed,
            costs=self.costs,
            size=size,
        )
        return run(config, workload)

    def capacity_per_s(self, workload: Workload) -> float:
        """By bisection, with the first seed."""
        low, high = 0.0, 64.0
        for _ in range(_SEARCH_STEPS):
            middle = (low + high) / 2
            found = self.run("live", workload, middle, 0, self.options.seeds[0])
            low, high = (middle, high) if found.outcome.attained >= _ATTAINED else (low, middle)
        return low


def rows_of(bench: Bench, workload: Workload, capacity: float) -> list[dict[str, Any]]:
    """Arms of one load and seed follow one another, on the same turns."""
    options, rows = bench.options, []
    for seed in options.seeds:
        alone = bench.run("fcfs", workload, 0.0, options.in_flight, seed)
        rows.append(_row(ALONE, 0.0, 0.0, seed, alone))
        for load in options.loads:
            per_s = load * capacity
            for name, arm, n in (
                (STOCK_ALONE, "fcfs", 0),
                (LIVE_ALONE, "live", 0),
                *((arm, arm, options.in_flight) for arm in options.arms),
            ):
                row = _row(name, load, per_s, seed, bench.run(arm, workload, per_s, n, seed))
                turns = workload.turns(per_s, options.seconds, options.seeds[0])
                idle = max(0.0, 1 - needed_share(turns, bench.costs, options.seconds))
                row["bound_tokens_per_s"] = round(idle * alone.outcome.be_tokens_per_s, 1)
                rows.append(row)
                print(line(row), flush=True)
    return rows


def _row(name: str, load: float, per_s: float, seed: int, made: Run) -> dict[str, Any]:
    rounds = made.arm.rounds
    row = {"arm": name, "load": load, "per_s": round(per_s, 3), "seed": seed}
    row |= made.outcome.to_json() | asdict(made.engine.counts)
    if rounds is not None and rounds.totals["rounds"]:
        row["policy_ms"] = round(1000 * rounds.totals["decide_s"] / rounds.totals["rounds"], 4)
    return row


def _options() -> Options:
    parser = argparse.ArgumentParser("python -m benchmark.hybrid", description=__doc__)
    default = Options()
    parser.add_argument("--gpu", choices=("h100", "h200"), default=default.gpu)
    parser.add_argument("--kind", choices=KINDS, default=default.kind)
    parser.add_argument("--best-effort", choices=SERVICES, default=default.best_effort)
    parser.add_argument("--loads", type=_floats, default=default.loads, metavar="SHARE,…")
    parser.add_argument("--seconds", type=float, default=default.seconds)
    parser.add_argument("--seeds", type=_ints, default=default.seeds, metavar="N,…")
    parser.add_argument("--in-flight", type=int, default=default.in_flight)
    parser.add_argument("--pool-tokens", type=int, default=default.pool_tokens)
    parser.add_argument("--chunk-tokens", type=int, default=default.chunk_tokens)
    parser.add_argument("--arms", type=_names, default=default.arms, metavar="NAME,…")
    parser.add_argument("--json", default="")
    return replace(default, **vars(parser.parse_args()))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ARMS]:
        raise argparse.ArgumentTypeError(f"unknown arms {unknown}: {', '.join(ARMS)}")
    return names


def main() -> None:
    options = _options()
    path = H100.with_name(f"{options.gpu}_qwen3_omni.toml")
    bench = Bench(options, load_device_model(path).thinker)
    lengths = (options.kind, options.best_effort)
    capacity = bench.capacity_per_s(Workload.load("tune", *lengths))
    print(f"capacity: {capacity:.2f} turns per second", flush=True)
    rows = rows_of(bench, Workload.load("held_out", *lengths), capacity)
    objectives = {"ttft_s": TTFT_S, "tpot_s": TPOT_S, "lead_s": LEAD_S}
    document = facts(path) | {
        "benchmark": "simulated_hybrid",
        "config": config_of(options),
        "objectives": objectives,
        "capacity_per_s": capacity,
        "rows": rows,
        "summary": summary(rows),
    }
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
