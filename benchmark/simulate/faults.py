"""Faults in simulated runs: what the orchestrator leaves behind, and whether every turn ends.

A seed draws users and faults: a stage dies, a link stalls, answers of an engine or acks of clients
are lost, a client vanishes. The same seed is the same run, event by event, so that what one run
shows can be looked at again.

    python -m benchmark.simulate.faults --seeds 100
    python -m benchmark.simulate.faults --first 17 --seeds 1 --trace
"""

import argparse
import asyncio
import hashlib
import logging
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_live.aio import failed_tasks
from sglang_live.core import FRAME_S, OUTPUT_RATE_HZ
from sglang_live.extensions.planner.device_model.model import H100, load_device_model
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.load.arrivals import PlannedTurn
from sglang_live.extensions.planner.simulation.placement import SHARED, Placement
from sglang_live.extensions.planner.simulation.run import Arm
from sglang_live.extensions.planner.simulation.server.call import Call
from sglang_live.extensions.planner.simulation.server.server import Server
from sglang_live.extensions.planner.simulation.server.vocoder import MISSING_S
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.extensions.planner.simulation.users import User, UserSettings
from sglang_live.extensions.planner.simulation.workload import Workload

ARMS = ("all", "all", "off", "truncate+preheat", "urgency+truncate+next-use+preload")
# One replica of each stage on one device, or two of each.
PLACEMENTS = (SHARED, Placement(thinkers=(0, 1), talkers=(0, 1), vocoders=(0, 1)))
KINDS = ("death", "death", "stall", "lost_answers", "lost_acks", "vanish")
# A turn ends within this time beside the faults: its thinker is silent for 30 s at most, and the
# turn before it may wind down for 10.
_TURN_S = 90.0
# A session is free within this time of its client's end.
_CLOSED_S = 2.0
_LONGEST_FAULT_S = 25.0
# No run takes longer: its users have three turns, and try again after a failure.
_RUN_S = 1_000.0
_SAMPLE_S = 1 / OUTPUT_RATE_HZ
# Faults begin within this time.
_FAULTS_S = 30.0
_USERS, _TURNS, _MOST_FAULTS = (2, 6), 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """at_s: when it begins. for_s: how long it lasts. which: of the stages' processes, or users."""

    kind: str
    at_s: float
    for_s: float
    which: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """seed: of everything else."""

    seed: int
    arm: str
    placement: Placement
    n_users: int
    barge_in: float
    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, seed: int) -> "Scenario":
        rng = random.Random(seed)
        faults = [
            Fault(
                kind=rng.choice(KINDS),
                at_s=rng.uniform(0.0, _FAULTS_S),
                for_s=rng.choice((0.3, 2.0, rng.uniform(0.0, _LONGEST_FAULT_S))),
                which=rng.randrange(1 << 16),
            )
            for _ in range(rng.randint(1, _MOST_FAULTS))
        ]
        return cls(
            seed=seed,
            arm=rng.choice(ARMS),
            placement=rng.choice(PLACEMENTS),
            n_users=rng.randint(*_USERS),
            barge_in=rng.choice((0.0, 0.5, 1.0)),
            faults=tuple(sorted(faults, key=lambda one: one.at_s)),
        )


@dataclass(slots=True)
class Outcome:
    """
    wrong: what must not be.
    statuses: of turns.
    trace: what reached the clients, and when.
    """

    wrong: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    trace: list[tuple[float, str, str, float]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return hashlib.blake2b(repr(self.trace).encode(), digest_size=8).hexdigest()


def run(scenario: Scenario) -> Outcome:
    """One run, from its begin until nothing happens any more."""
    n_failed = failed_tasks.n_by_name.total()
    arm, events = Arm.parse(scenario.arm), Events()
    spec = ServerSpec(model=load_device_model(H100), placement=scenario.placement)
    server = Server(arm.applied(spec), arm.policies, events)
    workload = Workload.load(turns=_TURNS, barge_in=scenario.barge_in, seed=scenario.seed)
    settings = UserSettings(timeout_s=4 * _TURN_S, acks=scenario.seed % 2 == 0)
    plans = workload.plans(scenario.n_users, 0)
    users = [User(plan, workload.clips, server, settings) for plan in plans]
    outcome = Outcome()
    _record(server, outcome)
    for fault in scenario.faults:
        _plan(fault, server, users)
    try:
        server.run(until_s=_RUN_S)
        _check(server, users, outcome)
    finally:
        server.end()
    if n := failed_tasks.n_by_name.total() - n_failed:
        outcome.wrong.append(f"{n} background tasks failed")
    return outcome


def _record(server: Server, outcome: Outcome) -> None:
    """Note every event that reaches a client; ids are random, and left out."""

    def receive(call: Call, event_type: str, audio_s: float, fields: dict[str, Any]) -> None:
        status = fields["response"]["status"] if event_type == "response.done" else ""
        at_s = round(server.events.now_s(), 9)
        session_id = call.voice.session_id
        outcome.trace.append((at_s, session_id, f"{event_type} {status}", round(audio_s, 6)))

    server.on_client_event = receive


def _plan(fault: Fault, server: Server, users: Sequence[User]) -> None:
    processes = server.replicas.processes

    def begin() -> None:
        until_s = server.events.now_s() + fault.for_s
        process = processes[fault.which % len(processes)]
        link = process.link
        match fault.kind:
            case "death" if process.entry.is_up:
                server.kill(process, restart_s=fault.for_s)
            case "stall":
                # What waits is not overtaken.
                link.stalled_until_s = max(link.stalled_until_s, until_s)
            case "lost_answers":
                for one in server.replicas.thinkers:
                    one.answers_lost_until_s = until_s
            case "lost_acks":
                for session in server.sessions.values():
                    session.acks_lost_until_s = until_s
            case "vanish":
                users[fault.which % len(users)].vanish(noticed_s=fault.for_s)

    server.events.at(fault.at_s, begin)


def _check(server: Server, users: Sequence[User], outcome: Outcome) -> None:
    wrong = outcome.wrong
    for user in users:
        for heard in user.heard:
            if heard.done_s is None and not user.is_gone:
                wrong.append(f"a turn of {heard.created_s:.2f} s has no end")
            elif heard.done_s is not None and heard.done_s - heard.created_s > _TURN_S:
                wrong.append(f"a turn took {heard.done_s - heard.created_s:.0f} s")
        for row in user.rows:
            outcome.statuses[row.record.status] += 1
            made_s = _audio_s(user.plan.turns[row.turn])
            if row.record.status == "completed" and abs(row.record.audio_s - made_s) > _SAMPLE_S:
                wrong.append(f"{row.record.audio_s:.3f} s of {made_s:.3f} s were heard")
        if not user.has_left:
            wrong.append("a user has not left")
    if (longest_s := max(server.closing_s, default=0.0)) > _CLOSED_S:
        wrong.append(f"a session took {longest_s:.1f} s to close")
    left = {
        "sessions": len(server.orchestrator.sessions),
        "sessions that count": server.capacity.report().n_sessions,
        "bytes of conversations": server.parts.item_budget.used_bytes,
        "tasks": len(asyncio.all_tasks(server.loop)),
    }
    for process in server.replicas.processes:
        name = process.entry.name
        left[f"{name}: sessions"] = len(process.entry.sessions)
        left[f"{name}: client's jobs"] = process.link.n_jobs
        left |= {f"{name}: {what}": n for what, n in process.stage.held.items()}
    wrong += [f"left: {what}: {n}" for what, n in left.items() if n]
    wrong += [f"error: {error!r}" for error in server.loop.errors]


def _audio_s(planned: PlannedTurn) -> float:
    """Of a whole response."""
    assert planned.response_tokens is not None
    return (planned.response_tokens + 1) * FRAME_S - MISSING_S


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.simulate.faults")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seeds", type=int, default=20, metavar="N")
    parser.add_argument("--trace", action="store_true", help="print what reached the clients")
    args = parser.parse_args(argv)
    if not args.trace:
        logging.disable(logging.CRITICAL)
    n_wrong = 0
    for seed in range(args.first, args.first + args.seeds):
        scenario = Scenario.draw(seed)
        outcome = run(scenario)
        n_wrong += bool(outcome.wrong)
        if args.trace:
            for at_s, session_id, event, audio_s in outcome.trace:
                print(f"{at_s:10.4f} {session_id} {event} {audio_s:.3f}")
        if args.trace or outcome.wrong:
            print(f"seed {seed}: {scenario}")
        print(f"seed {seed}: {dict(outcome.statuses)} {outcome.digest} {outcome.wrong or 'ok'}")
    print(f"{args.seeds - n_wrong} of {args.seeds} runs leave nothing behind")
    return n_wrong > 0


if __name__ == "__main__":
    sys.exit(main())
