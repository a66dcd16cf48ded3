"""How many hosts a fleet needs, and which of them may go. Pure: no I/O, no clock.

In: what the gateways and their stages report, the hosts that there are. Out: a Wish.
Owner: one Scaling per fleet, asked every few seconds. It grows ahead of the calls, by the time that
a new host takes to serve, and shrinks once the fewer hosts would have done for ten minutes.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sglang_live.settings import Count, Positive, Seconds, Settings, Share, Whole

# One gateway whose hosts are sick must not set the size of the fleet.
_LEAST_FULL = 0.1
# Lateness that more hosts do not cure must not buy hosts without end: of its planned sessions a
# host is always trusted with this part, and after each rest with that much more.
_TRUSTED, _REGAINED = 0.5, 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan(Settings):
    """Hosts of one kind.

    stages: that each of them runs.
    sessions: that one serves within the target (`python -m sglang_live.extensions.planner`).
    cold_start_s: from the wish until it serves: a machine, and the longest `Ready.startup_s`.
    """

    stages: tuple[str, ...]
    sessions: Count
    cold_start_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig(Settings):
    """
    pools: by name.
    fill: share of the hosts' sessions that may be open.
    spare: further hosts of each zone.
    covers_zone: without any one of several zones, the others serve all calls. Not while one is out:
        the reserve is in use then.
    shrinks_s: for which fewer hosts must have been enough.
    stage_budget_s: of a stage's part of the time to the first audio.
    """

    pools: Mapping[str, PoolPlan]
    fill: Share = 0.85
    spare: Whole = 1
    covers_zone: bool = True
    shrinks_s: Positive = 600.0
    stage_budget_s: Mapping[str, float] = field(
        default_factory=lambda: {"thinker": 0.4, "talker": 0.3, "vocoder": 0.3}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLoad:
    """See Capacity. arrivals_per_s: with those that were refused. ends_per_s: of sessions."""

    n_open: int
    limit: int
    why: str
    share: float | None
    arrivals_per_s: float
    ends_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """The slowest of the fleet. p90_s: of the stage's part of the time to the first audio."""

    p90_s: float | None = None
    pool_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    name: str
    pool: str
    zone: str
    n_open: int
    state: Literal["starting", "up", "draining"] = "up"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNow:
    """zones: those that have hosts to give. lost: others, that are out."""

    gateways: Sequence[GatewayLoad]
    stages: Mapping[str, StageLoad]
    hosts: Sequence[Host]
    zones: tuple[str, ...]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """
    hosts: by pool and zone, with those that start already. The pool that needs them most is first.
    drain: names of the hosts to empty and then to release. One that is draining already and not
        among them is to serve again.
    """

    hosts: Mapping[str, Mapping[str, int]]
    drain: tuple[str, ...]


class Scaling:
    def __init__(self, config: ScalingConfig):
        self._config = config
        self._sessions = {name: float(plan.sessions) for name, plan in config.pools.items()}
        self._needs = {name: _Highest(config.shrinks_s) for name in config.pools}
        self._rested_s = -math.inf

    def wish(self, now_s: float, fleet: FleetNow) -> Wish:
        """What the fleet should have now. Ask every few seconds, with a time that only grows.

        Raises:
            ValueError: no zone has hosts to give, or a host is of no pool.
        """
        if not fleet.zones or {one.pool for one in fleet.hosts} - set(self._config.pools):
            raise ValueError("a fleet has zones, and its hosts are of its pools")
        plans, n_open = self._config.pools, sum(one.n_open for one in fleet.gateways)
        came = sum(one.arrivals_per_s - one.ends_per_s for one in fleet.gateways)
        worst = {name: self._share(plan, fleet.stages) for name, plan in plans.items()}
        pools = sorted(plans, key=worst.__getitem__, reverse=True)
        self._learn(now_s, fleet, pools[0], worst[pools[0]])
        hosts, drain = {}, []
        for name in pools:
            expected = n_open + max(0.0, came) * plans[name].cold_start_s
            need = self._needed(expected, self._sessions[name], fleet)
            most = self._needs[name].of(now_s, need)
            own = [one for one in fleet.hosts if one.pool == name]
            hosts[name] = _spread(most, own, fleet.zones)
            drain += _superfluous(own, hosts[name], most)
        return Wish(hosts=hosts, drain=tuple(drain))

    def _needed(self, expected: float, sessions: float, fleet: FleetNow) -> int:
        config, n_zones = self._config, len(fleet.zones)
        n = math.ceil(expected / (config.fill * sessions)) + config.spare * n_zones
        if config.covers_zone and n_zones > 1 and not fleet.lost:
            rest = math.ceil(expected / sessions)  # in all zones but the largest
            n = max(n, rest + math.ceil(rest / (n_zones - 1)))
        return max(1, n)

    def _share(self, plan: PoolPlan, stages: Mapping[str, StageLoad]) -> float:
        """The largest share of its budget that a stage of the pool takes, or of its KV."""
        shares = [0.0]
        for stage in plan.stages:
            load = stages.get(stage, StageLoad())
            shares.append((load.p90_s or 0.0) / self._config.stage_budget_s.get(stage, math.inf))
            shares.append(load.pool_share or 0.0)
        return max(shares)

    def _learn(self, now_s: float, fleet: FleetNow, worst: str, share: float) -> None:
        """A host of the worst pool serves fewer sessions than planned if gateways are full with
        what its fullest hosts have, and late; after a while without such gateways it is trusted
        with more."""
        fill = self._config.fill
        full = [g for g in fleet.gateways if g.why and max(g.share or 0.0, share) >= fill]
        fullest = sorted(h.n_open for h in fleet.hosts if h.pool == worst and h.state == "up")
        if full and fullest and len(full) >= _LEAST_FULL * len(fleet.gateways):
            least = _TRUSTED * self._config.pools[worst].sessions
            served = max(least, fullest[(9 * len(fullest) - 1) // 10])
            self._sessions[worst] = min(self._sessions[worst], served)
            self._rested_s = now_s + self._config.shrinks_s
        elif now_s >= self._rested_s:
            self._rested_s = now_s + self._config.shrinks_s
            for name, plan in self._config.pools.items():
                self._sessions[name] = min(plan.sessions, _REGAINED * self._sessions[name])


class _Highest:
    """The highest of the values of the last `span_s`."""

    def __init__(self, span_s: float):
        self._span_s = span_s
        self._falling: deque[tuple[float, int]] = deque()  # time, value

    def of(self, now_s: float, value: int) -> int:
        """With this one."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        falling.append((now_s, value))
        while falling[0][0] < now_s - self._span_s:
            falling.popleft()
        return falling[0][1]


def _spread(n: int, hosts: Iterable[Host], zones: Sequence[str]) -> dict[str, int]:
    """n hosts over the zones, evenly; those that have most already get the odd ones."""
    has = {zone: 0 for zone in zones}
    for one in hosts:
        if one.zone in has:
            has[one.zone] += 1
    each, odd = divmod(n, len(zones))
    by_size = sorted(zones, key=lambda zone: -has[zone])
    return {zone: each + (zone in by_size[:odd]) for zone in zones}


def _superfluous(hosts: Sequence[Host], wanted: Mapping[str, int], n_wanted: int) -> list[str]:
    """The emptiest hosts of zones that have too many, while as many others serve as are wanted."""
    found: list[Host] = []
    for zone in {one.zone for one in hosts}:
        own = [one for one in hosts if one.zone == zone]
        # A host that drains already goes before one that would have to begin.
        own.sort(key=lambda one: (one.state != "draining", one.n_open, one.name))
        found += own[: max(0, len(own) - wanted.get(zone, 0))]
    serving = sum(one.state != "starting" for one in hosts)
    found.sort(key=lambda one: (one.state != "draining", one.n_open, one.name))
    n_more = max(0, serving - n_wanted)
    kept = [one for one in found if one.state != "starting"][n_more:]
    return [one.name for one in found if one not in kept]
