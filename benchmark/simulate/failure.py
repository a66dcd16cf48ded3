"""What one failure of a stage costs, with every turn simulated.

python -m benchmark.simulate.failure --gpu h200 --users 40 --restart-s 67
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.config import PlanConfig
from sglang_live.extensions.planner.config import parse_args as parse_plan
from sglang_live.extensions.planner.layouts import layouts
from sglang_live.extensions.planner.memory import memory_of
from sglang_live.extensions.planner.search import world_of
from sglang_live.extensions.planner.simulation.load.rows import TurnRow
from sglang_live.extensions.planner.simulation.server.server import Server

# When the stage dies, and the time before it and after its restart that are compared.
_AT_S, _SPAN_S = 60.0, 30.0
STAGES = ("thinker", "talker", "vocoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    plan: PlanConfig
    users: int
    restart_s: float

    def __post_init__(self) -> None:
        if self.users < 1 or not 0 < self.restart_s < 3600:
            raise ValueError("--users is from 1 on, --restart-s positive and below an hour")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """
    turns: in all. failed: of these. rebuilt: sessions whose conversation was prefilled again.
    before_ms, after_ms: P90 of the first audio in the spans before the failure and from the
        restart on.
    """

    stage: str
    turns: int
    failed: int
    rebuilt: int
    before_ms: float
    after_ms: float


def measure(config: FailureConfig, stage: str) -> Failure:
    """One server with all stages on one GPU, of which one dies."""
    plan, layout = config.plan, layouts(1)[0]
    memory = memory_of(layout.placement, plan.gpu.free_gib, plan.sizes, plan.model)
    world = world_of(plan, layout, memory)
    # Turns until the span after the restart is over; those that fail are as short as the user's.
    n_turns = (_AT_S + 2 * _SPAN_S) / plan.pattern.turn_s + config.restart_s / plan.pattern.talk_s
    world.workload = replace(world.workload, turns=math.ceil(n_turns))

    def prepare(server: Server) -> None:
        processes = server.replicas.processes
        process = next(one for one in processes if one.entry.spec.stage == stage)
        server.events.at(_AT_S, lambda: server.kill(process, config.restart_s))

    found = world.simulate("all", config.users, prepare=prepare)
    restart_s = _AT_S + config.restart_s
    return Failure(
        stage=stage,
        turns=len(found.rows),
        failed=sum(not row.record.ok for row in found.rows),
        rebuilt=found.n_rebuilt,
        before_ms=_p90_ms(found.rows, _AT_S - _SPAN_S, _AT_S),
        after_ms=_p90_ms(found.rows, restart_s, restart_s + _SPAN_S),
    )


def _p90_ms(rows: Sequence[TurnRow], from_s: float, until_s: float) -> float:
    """Of the turns that begin within this time."""
    known = [
        row.record.ttfp_after_detection_ms
        for row in rows
        if from_s <= row.start_s < until_s and row.record.ok
    ]
    return float(np.percentile([ms for ms in known if ms is not None], 90))


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    print(f"Simulated, modelled device: {config.plan.model.name}; {config.users} users")
    print("| stage | turns | failed | sessions rebuilt | P90 before, ms | P90 after, ms |")
    print("|---|---|---|---|---|---|")
    for stage in STAGES:
        one = measure(config, stage)
        print(
            f"| {one.stage} | {one.turns} | {one.failed} | {one.rebuilt} | {one.before_ms:.0f} | "
            f"{one.after_ms:.0f} |"
        )
    return 0


def parse_args(argv: list[str] | None = None) -> FailureConfig:
    """Other flags are those of sglang_live.extensions.planner."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.simulate.failure", allow_abbrev=False
    )
    parser.add_argument("--users", type=int, default=40, metavar="N")
    parser.add_argument("--restart-s", type=float, default=67.0, metavar="S")
    own, rest = parser.parse_known_args(argv)
    try:
        return FailureConfig(plan=parse_plan(rest), **vars(own))
    except (ValueError, BadInputError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
