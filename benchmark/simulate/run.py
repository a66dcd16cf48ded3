"""One simulated run: a fresh server, its users, and their records."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.load.config import WORKLOADS, LoadConfig, Run
from benchmark.load.point import RunResult, Workload
from benchmark.load.response_lengths import ResponseLengths
from benchmark.simulate.events import Events
from benchmark.simulate.server import Server
from benchmark.simulate.spec import ServerSpec
from benchmark.simulate.users import Clip, User, UserSettings
from sglang_live.client.clip import FRAME_S
from sglang_live.policy.policies import POLICIES, Policies

_ENDS = WORKLOADS / "end_of_turn.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """
    Attributes:
        n_rebuilt: sessions whose conversation was prefilled again.
        most_used: largest use of each KV pool, in tokens.
        busy: share of the time in which each stage computes.
    """

    result: RunResult
    n_rebuilt: int
    most_used: dict[str, int]
    busy: dict[str, float]


def policies_of(arm: str) -> Policies:
    """As voice_load: `all` is every policy except admission."""
    if arm == "all":
        return Policies.parse(name for name in POLICIES if name != "admission")
    return Policies.from_flag(arm.replace("+", ","))


def clips_of(workload: Workload, ends: Path = _ENDS) -> dict[str, Clip]:
    known_ms = json.loads(ends.read_text())["end_of_turn_ms"]
    return {
        name: Clip(
            duration_s=utterance.duration_s,
            onset_s=utterance.onset * FRAME_S,
            end_s=utterance.end * FRAME_S,
            end_known_s=known_ms[name] / 1000,
        )
        for name, utterance in workload.speech.items()
    }


class World:
    """What all runs of an experiment share: clips, draws, server and users' settings."""

    def __init__(self, load: LoadConfig, server: ServerSpec, settings: UserSettings):
        self._load, self._server, self._settings = load, server, settings
        self._workload = _scaled(Workload.load(load), settings.reply_scale)
        self._clips = clips_of(self._workload)

    def simulate(self, run: Run) -> Simulated:
        """Raises PoolFullError if a KV pool is too small for the load."""
        events = Events()
        spec = replace(self._server, max_sessions=max(self._server.max_sessions, run.sessions))
        server = Server(spec, policies_of(run.policies), events)
        plans = self._workload.plans(self._load, run)
        users = [User(plan, self._clips, server, self._settings) for plan in plans]
        events.run()
        return _simulated(run, server, users)


def _scaled(workload: Workload, factor: float) -> Workload:
    """The workload with responses of another length, which are interrupted as much later."""
    durations_s = factor * workload.interruptions.response_durations_s
    return replace(
        workload,
        interruptions=replace(workload.interruptions, response_durations_s=durations_s),
        response_lengths=ResponseLengths(durations_s),
    )


def _simulated(run: Run, server: Server, users: list[User]) -> Simulated:
    rows = [row for user in users for row in user.rows]
    ends_s = [row.end_s for row in rows] + [user.played_out_s for user in users]
    wall_s = max(ends_s) - min(row.start_s for row in rows)
    busy_s = {
        stage: sum(device.busy_s[stage] for device in server.devices)
        for stage in ("thinker", "talker", "vocoder")
    }
    pools = (server.thinker.pool, server.talker.pool)
    return Simulated(
        result=RunResult(
            run=run,
            rows=rows,
            wall_s=wall_s,
            server_start_s=0.0,
            late_frames=0.0,
            talker_frames=server.n_frames,
        ),
        n_rebuilt=server.sessions.n_rebuilt,
        most_used={pool.name: pool.most_used for pool in pools},
        busy={stage: one_s / wall_s for stage, one_s in busy_s.items()},
    )
