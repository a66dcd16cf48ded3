"""One simulated run: a fresh server, its users, and their records."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.load.rows import StormRow, TurnRow
from sglang_live.extensions.planner.simulation.load.stats import PointStats, RunTotals, point_stats
from sglang_live.extensions.planner.simulation.load.storm import StormSpec
from sglang_live.extensions.planner.simulation.load.timeline import most_at_once
from sglang_live.extensions.planner.simulation.noise import Noise
from sglang_live.extensions.planner.simulation.server.server import Server
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.extensions.planner.simulation.storm import Storm
from sglang_live.extensions.planner.simulation.turn_record import BARGE_IN
from sglang_live.extensions.planner.simulation.users import User, UserSettings
from sglang_live.extensions.planner.simulation.workload import Workload
from sglang_live.policy.policies import OFF, POLICIES, Policies

# The arm of every policy.
ADMITTED = "all+admission"

Prepare = Callable[[Server], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """
    Attributes:
        wall_s: from the first user's start until the last response has been played, at end_s.
        talker_frames: codec frames that the talker made.
        n_rebuilt: sessions whose conversation was prefilled again.
        most_used: largest use of a KV pool of each stage, in tokens.
        busy: share of wall_s in which the busiest device computes.
        most_sessions, sessions_left: open at once, and when nothing happens any more.
    """

    rows: list[TurnRow]
    wall_s: float
    end_s: float
    talker_frames: int
    n_rebuilt: int
    most_used: dict[str, int]
    busy: float
    most_sessions: int
    sessions_left: int
    storm_rows: tuple[StormRow, ...] = ()

    @property
    def totals(self) -> RunTotals:
        planned = (row.planned for row in self.rows)
        return RunTotals(
            wall_s=self.wall_s,
            cpu_s=0.0,
            peak_rss_mib=0.0,
            late_frames=0.0,
            barge_ins_planned=sum(one is not None and one.kind == BARGE_IN for one in planned),
            talker_frames=self.talker_frames,
            storm_rows=self.storm_rows,
        )


@dataclass(frozen=True, slots=True)
class Arm:
    """What an experiment compares.

    stateless: clients of plain SGLang, which send the whole conversation; see ServerSpec.
    overlap: of scheduler and device; without it, no round is decided before the result of the one
        before it.
    """

    policies: Policies
    stateless: bool = False
    overlap: bool = True

    @classmethod
    def parse(cls, name: str) -> Self:
        """`stock`, `off`, `all`, ADMITTED, or policies joined by +; with +no-overlap.

        `all` is every policy except admission, as in voice_load.
        """
        words = name.split("+")
        overlap = "no-overlap" not in words
        words = [word for word in words if word != "no-overlap"]
        if name == ADMITTED:
            return cls(Policies.parse(POLICIES))
        if words == ["all"]:
            policies = Policies.parse(name for name in POLICIES if name != "admission")
            return cls(policies, overlap=overlap)
        if words == ["stock"]:
            return cls(OFF, stateless=True, overlap=overlap)
        return cls(Policies.from_flag(",".join(words)), overlap=overlap)

    @property
    def is_baseline(self) -> bool:
        """Whether SGLang alone decides about rounds."""
        return not self.policies.decides_rounds

    def applied(self, spec: ServerSpec) -> ServerSpec:
        return replace(spec, stateless=self.stateless, overlap=spec.overlap and self.overlap)


class World:
    """What all runs of an experiment share: draws, server and users' settings, and storms."""

    def __init__(
        self,
        workload: Workload,
        server: ServerSpec,
        settings: UserSettings,
        storm: StormSpec | None = None,
        noise: Noise | None = None,
    ):
        self.workload = workload.with_longer_responses(settings.reply_scale)
        self.server = server
        self.settings = settings
        self._storm = storm
        self._noise = noise

    def simulate(
        self, arm: str, n_users: int, repeat: int = 0, prepare: Prepare = lambda server: None
    ) -> Simulated:
        """
        Args:
            prepare: called before the run, to plan what happens to the server.
        Raises:
            PoolFullError: a KV pool is too small for the load.
        """
        events = Events()
        of_arm = Arm.parse(arm)
        spec = replace(self.server, max_sessions=max(self.server.max_sessions, n_users + 1))
        server = Server(of_arm.applied(spec), of_arm.policies, events)
        prepare(server)
        clips, settings = self.workload.clips, self.settings
        plans = self.workload.plans(n_users, repeat)
        users = [User(plan, clips, server, settings) for plan in plans]
        storm = None

        def have_left() -> bool:
            return all(user.has_left for user in users)

        if self._storm is not None:
            storm = Storm(self._storm, server, have_left)
        if self._noise is not None:
            devices = list(server.replicas.devices.values())
            self._noise.begin(events, devices, repeat, have_left)
        try:
            server.run()
        finally:
            server.end()
        found = _simulated(server, users)
        return found if storm is None else replace(found, storm_rows=tuple(storm.rows))


def point_of(arm: str, n_users: int, runs: list[Simulated]) -> PointStats:
    """All runs of an arm with this number of users together."""
    records = [row.record for run in runs for row in run.rows]
    return point_stats(arm, n_users, records, [run.totals for run in runs])


def _simulated(server: Server, users: list[User]) -> Simulated:
    rows = [row for user in users for row in user.rows]
    ends_s = [row.end_s for row in rows] + [user.played_out_s for user in users]
    end_s = max(ends_s)
    wall_s = end_s - min(row.start_s for row in rows)
    replicas = server.replicas
    engines = replicas.engines
    return Simulated(
        rows=rows,
        wall_s=wall_s,
        end_s=end_s,
        talker_frames=server.n_frames,
        n_rebuilt=replicas.n_rebuilt,
        most_used={
            stage: max(one.pool.most_used for one in engines if one.pool.name == stage)
            for stage in ("thinker", "talker")
        },
        busy=max(sum(one.busy_s.values()) for one in replicas.devices.values()) / wall_s,
        most_sessions=most_at_once([user.present_s for user in users]),
        sessions_left=len(server.sessions),
    )
