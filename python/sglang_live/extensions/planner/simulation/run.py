"""One simulated run: a fresh server, its users, and their records."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.load.rows import StormRow, TurnRow
from sglang_live.extensions.planner.simulation.load.stats import PointStats, RunTotals, point_stats
from sglang_live.extensions.planner.simulation.load.storm import StormSpec
from sglang_live.extensions.planner.simulation.load.timeline import most_at_once
from sglang_live.extensions.planner.simulation.server.server import Server
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.extensions.planner.simulation.storm import Storm
from sglang_live.extensions.planner.simulation.turn_record import BARGE_IN
from sglang_live.extensions.planner.simulation.users import User, UserSettings
from sglang_live.extensions.planner.simulation.workload import Workload
from sglang_live.policy.policies import POLICIES, Policies

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
        most_sessions, sessions_left: open at once, and when nothing happens any more.
    """

    rows: list[TurnRow]
    wall_s: float
    end_s: float
    talker_frames: int
    n_rebuilt: int
    most_used: dict[str, int]
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


def policies_of(arm: str) -> Policies:
    """As voice_load: `all` is every policy except admission, with which it is ADMITTED."""
    if arm == ADMITTED:
        return Policies.parse(POLICIES)
    if arm == "all":
        return Policies.parse(name for name in POLICIES if name != "admission")
    return Policies.from_flag(arm.replace("+", ","))


class World:
    """What all runs of an experiment share: draws, server and users' settings, and storms."""

    def __init__(
        self,
        workload: Workload,
        server: ServerSpec,
        settings: UserSettings,
        storm: StormSpec | None = None,
    ):
        self.workload = workload.with_longer_responses(settings.reply_scale)
        self.server = server
        self.settings = settings
        self._storm = storm

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
        spec = replace(self.server, max_sessions=max(self.server.max_sessions, n_users))
        server = Server(spec, policies_of(arm), events)
        prepare(server)
        clips, settings = self.workload.clips, self.settings
        plans = self.workload.plans(n_users, repeat)
        users = [User(plan, clips, server, settings) for plan in plans]
        storm = None
        if self._storm is not None:
            storm = Storm(self._storm, server, lambda: all(user.has_left for user in users))
        events.run()
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
    engines = [one.engine for one in (*replicas.thinkers, *replicas.talkers)]
    return Simulated(
        rows=rows,
        wall_s=wall_s,
        end_s=end_s,
        talker_frames=server.n_frames,
        n_rebuilt=sum(thinker.kv.n_rebuilt for thinker in replicas.thinkers),
        most_used={
            stage: max(one.pool.most_used for one in engines if one.pool.name == stage)
            for stage in ("thinker", "talker")
        },
        most_sessions=most_at_once([user.present_s for user in users]),
        sessions_left=len(server.sessions),
    )
