"""One simulated run: turns that users listen to beside a full queue of best-effort work."""

import itertools
from dataclasses import dataclass

from benchmark.hybrid.arms import Arm, arm_of
from benchmark.hybrid.engine import EngineSize, HybridEngine
from benchmark.hybrid.listeners import LEAD_S, Job, Outcome, Record
from benchmark.hybrid.workload import Workload
from sglang_live.extensions.planner.device_model.costs import EngineCosts
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.messages import HeardOfMany
from sglang_live.policy.config import THINKER

# Before it the engine fills; the latest turns have not been served at the end.
WARM_S, TAIL_S = 10.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """
    arm: a name of arms.ARMS.
    per_s: turns per second; 0: none.
    n_best_effort: best-effort requests in flight, queue included; 0: none.
    """

    arm: str
    per_s: float
    n_best_effort: int
    duration_s: float
    seed: int
    costs: EngineCosts
    size: EngineSize


@dataclass(frozen=True, slots=True)
class Run:
    outcome: Outcome
    engine: HybridEngine
    arm: Arm


def run(config: RunConfig, workload: Workload) -> Run:
    events = Events()
    arm = arm_of(config.arm, config.costs, config.size)
    record = Record(events, WARM_S)
    engine = HybridEngine(config.costs, config.size, events, arm, record)
    numbers, supply = itertools.count(), workload.supply(config.seed)

    def give_more() -> None:
        job = Job(next(supply), heard=False, arrives_s=events.now_s())
        _send(engine, job.request(next(numbers)))

    def ask(job: Job) -> None:
        record.jobs.append(job)
        _send(engine, job.request(next(numbers)))

    def listens(req: Request) -> None:
        """The listener hears one second per second from now on."""
        rounds = engine.rounds
        if rounds is None or req.is_finished:
            return
        news = HeardOfMany.of([req.rid], [0.0], [True])
        engine.post(lambda: rounds.progress(news))

    record.more = give_more
    # What the thinker makes is heard after the stages behind it, as its policies assume.
    heard_after_s = LEAD_S + THINKER.stage.pipeline_s
    record.started = lambda req: events.after(heard_after_s, lambda: listens(req))
    for work in workload.turns(config.per_s, config.duration_s, config.seed):
        job = Job(work, heard=True, arrives_s=work.arrives_s)
        events.at(work.arrives_s, lambda job=job: ask(job))
    for _ in range(config.n_best_effort):
        events.at(0.0, give_more)
    events.run(config.duration_s)
    busy_s = engine.device.busy_s[engine.spec.name]
    return Run(record.outcome(config.duration_s, TAIL_S, busy_s), engine, arm)


def _send(engine: HybridEngine, req: Request) -> None:
    engine.post(lambda: engine.add(req))
