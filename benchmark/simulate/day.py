"""A day of a fleet of many servers behind many gateways, from session to session.

In: arrivals, and what one server gives its users at each number of them, which the simulation of
turns has found. Out: who was refused, failed or moved, how turns were served, GPU-hours.
Which server a session gets, how many a gateway admits and how many servers there are is decided by
the product's own code. Turns are not simulated here: a server with n sessions serves a turn as well
as in the table for n, and worse while it prefills conversations that have moved to it.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmark.simulate.traffic import DAY_S
from sglang_live.capacity.aimd import Aimd
from sglang_live.capacity.deadlines import Verdict
from sglang_live.capacity.scaling import (
    FleetNow,
    GatewayLoad,
    Host,
    PoolPlan,
    Scaling,
    ScalingConfig,
)
from sglang_live.errors import StageUnavailableError
from sglang_live.orchestrator.replica_choice import least_loaded

# Random numbers apart from those of the arrivals.
_STREAM = 1
_STEP_S, _ASKED_S, _RATE_S = 30.0, 60.0, 60.0
_WINDOW_S = 5.0  # of a gateway that is full; others are judged in each step
ZONES = ("a", "b", "c")
_POOL = "servers"
# Servers that a gateway is connected to, at least, and gateways of a server.
_HOMES, _HOME_GATEWAYS = 6, 3
# On one core (docs/deploy.md), and of these as many as are used while a zone is out.
_GATEWAY_SESSIONS, _GATEWAY_FILL = 250, 0.8
# Requests beside the sessions that a stage has rows for (planner/layouts.py).
_SPARE_ROWS = 32
# What a server's turns cost more while all of its conversations are prefilled again, and how long
# that lasts (benchmark.simulate.failure).
_REBUILT, _REBUILT_S = 0.10, 30.0
# A session that takes no turn for this time moves without one.
_DRAINED_S = 60.0
# Verdicts of a window vary.
_NOISE = 0.05
_FIRST_AUDIO_MS = 500.0  # --admission-first-audio-ms
_BATCH = 0.05  # of the servers, replaced at once in a rollout
_BIN_MS = 2000
QUANTILES = np.linspace(0.025, 0.975, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of a server's turns by its number of sessions; all have one entry for each point.

    first_audio_ms: by QUANTILES. turns_per_s: of one session.
    """

    users: tuple[int, ...]
    first_audio_ms: tuple[tuple[float, ...], ...]
    turns_per_s: tuple[float, ...]

    def at(self, n_sessions: np.ndarray) -> np.ndarray:
        """[n_servers, n_quantiles] ms; beyond the last point as from the one before to it."""
        users, values = np.array(self.users, float), np.array(self.first_audio_ms)
        low = np.clip(np.searchsorted(users, n_sessions) - 1, 0, len(users) - 2)
        part = np.maximum(0.0, (n_sessions - users[low]) / (users[low + 1] - users[low]))
        return values[low] + part[:, None] * (values[low + 1] - values[low])


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """
    users: sessions at once in the busiest moment.
    sessions: that a server serves within the target. n_gpus: of a server.
    least_s, more_s: a session lasts least_s, and then on average more_s, exponentially.
    scales: the number of servers follows the calls; else it is that of the peak.
    moves: a server that is to go hands its sessions over; else it waits for their ends.
    covers_zone: see ScalingConfig.
    cold_start_s: of a server. outage_s: of a zone, from the busiest moment on; 0: none.
    rollout_s: time of day from which all servers are replaced.
    days_between_failures: of a server.
    """

    users: int
    sessions: int
    n_gpus: int
    least_s: float = 1200.0
    more_s: float = 2184.6
    scales: bool = True
    moves: bool = True
    covers_zone: bool = True
    cold_start_s: float = 240.0
    outage_s: float = 3600.0
    rollout_s: float = 6 * 3600.0
    days_between_failures: float = 10.0

    @property
    def session_s(self) -> float:
        return self.least_s + self.more_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """
    refused, failed: of 100 arrivals; the second were cut off because no server had a row for them.
    refused_in_outage: the same within the outage.
    moved: moves of 100 calls. of_loss: of these, of a zone or a server that was lost.
    gpus_most, gpu_hours: with servers that start or drain.
    first_audio_ms: P50, P90, P99.
    drain_min: P50 and P95 of the time in which a server became empty.
    """

    arrivals: int
    users_most: int
    refused: float
    refused_in_outage: float
    failed: float
    moved: float
    of_loss: float
    gpus_most: int
    gpu_hours: float
    first_audio_ms: tuple[float, float, float]
    drain_min: tuple[float, float]


@dataclass(eq=False, slots=True)
class _Server:
    """
    replacement: in a rollout; the server goes when that one serves.
    moved: sessions that have come from others within the last time.
    """

    name: str
    zone: str
    ready_s: float
    sessions: dict["_Call", None] = field(default_factory=dict)  # a set that keeps its order
    is_up: bool = False
    drains_since_s: float | None = None
    is_new: bool = False
    replacement: "_Server | None" = None
    moved: float = 0.0

    @property
    def state(self) -> str:
        if self.drains_since_s is not None:
            return "draining"
        return "up" if self.is_up else "starting"


@dataclass(eq=False, slots=True)
class _Gateway:
    zone: str
    aimd: Aimd = field(default_factory=Aimd)
    sessions: dict["_Call", None] = field(default_factory=dict)  # a set that keeps its order
    homes: list[_Server] = field(default_factory=list)
    is_up: bool = True
    share: float = 0.0
    judged_s: float = 0.0

    @property
    def limit(self) -> int:
        return min(self.aimd.limit, _GATEWAY_SESSIONS)

    def judge(self, now_s: float) -> None:
        verdict = Verdict(self.share, 2 if self.share > 1 else 0, now_s - self.judged_s)
        self.aimd.window(verdict, len(self.sessions))
        self.judged_s = now_s

    def has_place(self, now_s: float) -> bool:
        if len(self.sessions) >= self.limit and now_s - self.judged_s >= _WINDOW_S:
            self.judge(now_s)
        return len(self.sessions) < self.limit


@dataclass(eq=False, slots=True)
class _Call:
    gateway: _Gateway
    server: _Server


def simulate_day(
    arrivals_s: np.ndarray,
    n_open: int,
    busiest_s: float,
    spec: FleetSpec,
    quality: Quality,
    seed: int,
) -> Day:
    """n_open: sessions at its beginning. busiest_s: when the outage begins."""
    day = _FleetDay(arrivals_s, busiest_s, spec, quality, seed)
    day.begin(n_open)
    return day.run()


class _FleetDay:
    def __init__(
        self,
        arrivals_s: np.ndarray,
        busiest_s: float,
        spec: FleetSpec,
        quality: Quality,
        seed: int,
    ):
        self._spec, self._quality = spec, quality
        self._rng = np.random.default_rng([seed, _STREAM])
        self._arrivals_s = arrivals_s
        self._outage_s = busiest_s, busiest_s + spec.outage_s
        plan = PoolPlan(
            stages=("thinker", "talker", "vocoder"),
            sessions=spec.sessions,
            cold_start_s=spec.cold_start_s,
        )
        self._config = ScalingConfig(pools={_POOL: plan}, covers_zone=spec.covers_zone)
        self._scaling = Scaling(self._config)
        self._servers: dict[str, _Server] = {}
        self._n_made = 0
        n_gateways = math.ceil(1.5 * spec.users / (_GATEWAY_FILL * _GATEWAY_SESSIONS))
        self._gateways = [_Gateway(ZONES[n % len(ZONES)]) for n in range(n_gateways)]
        self._ends: list[tuple[float, int, _Call]] = []
        self._numbers = itertools.count()
        self._n_calls = self._n_ended = 0
        self._came: deque[tuple[float, int, int]] = deque()
        self._have_changed = True
        # Servers and gateways that are up, and the numbers of each gateway's homes among the first.
        self._up: list[_Server] = []
        self._gateways_up = self._gateways
        self._homes = np.zeros((n_gateways, 1), int)
        self._fixed: dict[str, int] = {}
        # Of the day.
        self._refused = self._failed = self._moved = self._lost = self._most = self._gpus_most = 0
        self._in_outage = [0, 0]  # arrivals, refused
        self._gpu_s = 0.0
        self._drains_s: list[float] = []
        self._heard = np.zeros(_BIN_MS)

    def run(self) -> Day:
        at = 0
        for step in range(int(DAY_S / _STEP_S)):
            now_s = step * _STEP_S
            self._end_until(now_s)
            self._replace(now_s)
            if step % int(_ASKED_S / _STEP_S) == 0:
                self._scale(now_s)
            self._drain(now_s)
            self._draw_homes()
            until = int(np.searchsorted(self._arrivals_s, now_s + _STEP_S))
            self._admit(self._arrivals_s[at:until], now_s)
            at = until
            self._serve(now_s)
        return self._day()

    def begin(self, n_open: int) -> None:
        """As if the day before had been like this one."""
        spec, rng = self._spec, self._rng
        expected = n_open if spec.scales else spec.users
        load = GatewayLoad(
            n_open=expected, limit=0, why="", share=None, arrivals_per_s=0.0, ends_per_s=0.0
        )
        now = FleetNow(gateways=[load], stages={}, hosts=[], zones=ZONES)
        self._fixed = dict(Scaling(self._config).wish(0.0, now).hosts[_POOL])
        for zone, n in self._fixed.items():
            for _ in range(n):
                self._start(zone, -spec.cold_start_s).is_up = True
        self._draw_homes()
        # What is left of sessions that are met at any moment.
        is_early = rng.random(n_open) < spec.least_s / spec.session_s
        left_s = rng.exponential(spec.more_s, n_open) + is_early * rng.random(n_open) * spec.least_s
        for n, duration_s in enumerate(left_s.tolist()):
            gateway = self._gateways[n % len(self._gateways)]
            self._open(gateway, duration_s)
        for n in range(-60, 0):
            self._serve(n * _STEP_S)
        self._heard[:] = 0

    # --- calls ---

    def _admit(self, arrivals_s: np.ndarray, now_s: float) -> None:
        """HAProxy's leastconn, with the weights of the agent check."""
        up = [one for one in self._gateways if one.is_up]
        weights = [
            max(1, 100 * max(0, one.limit - len(one.sessions)) // max(1, one.limit)) for one in up
        ]
        heap = [((len(up[n].sessions) + 1) / weight, n) for n, weight in enumerate(weights)]
        heapq.heapify(heap)
        spec = self._spec
        durations_s = spec.least_s + self._rng.exponential(spec.more_s, len(arrivals_s))
        refused = 0
        for arrival_s, duration_s in zip(arrivals_s.tolist(), durations_s.tolist(), strict=True):
            n = heap[0][1]
            gateway = up[n]
            is_open = gateway.has_place(arrival_s) and self._open(gateway, arrival_s + duration_s)
            refused += not is_open
            heapq.heapreplace(heap, ((len(gateway.sessions) + 1) / weights[n], n))
        self._refused += refused
        if self._outage_s[0] <= now_s < self._outage_s[1]:
            self._in_outage[0] += len(arrivals_s)
            self._in_outage[1] += refused
        self._n_calls += len(arrivals_s)
        self._came.append((now_s, self._n_calls, self._n_ended))
        while self._came[0][0] < now_s - _RATE_S:
            self._came.popleft()
        self._most = max(self._most, len(self._ends))

    def _open(self, gateway: _Gateway, end_s: float) -> bool:
        server = self._server_of(gateway)
        if server is None:
            return False
        call = _Call(gateway, server)
        gateway.sessions[call] = server.sessions[call] = None
        heapq.heappush(self._ends, (end_s, next(self._numbers), call))
        return True

    def _server_of(self, gateway: _Gateway) -> _Server | None:
        rows = self._spec.sessions + _SPARE_ROWS
        try:
            found = least_loaded("server", gateway.homes, lambda one: len(one.sessions) < rows)
        except StageUnavailableError:
            return None
        return found if len(found.sessions) < rows else None

    def _end_until(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            call = heapq.heappop(self._ends)[2]
            if call in call.gateway.sessions:  # else it was cut off
                self._remove(call)
                self._n_ended += 1

    @staticmethod
    def _remove(call: _Call) -> None:
        del call.gateway.sessions[call], call.server.sessions[call]

    def _move(self, calls: Iterable[_Call], *, lost: bool = False) -> None:
        for call in list(calls):
            server = self._server_of(call.gateway)
            del call.server.sessions[call]
            if server is None:
                del call.gateway.sessions[call]
                self._failed += 1
                continue
            call.server = server
            server.sessions[call] = None
            server.moved += 1
            self._moved += 1
            self._lost += lost

    # --- servers ---

    def _start(self, zone: str, now_s: float) -> _Server:
        name = f"{zone}{self._n_made}"
        self._n_made += 1
        ready_s, is_new = now_s + self._spec.cold_start_s, now_s >= self._spec.rollout_s
        self._servers[name] = _Server(name, zone, ready_s, is_new=is_new)
        return self._servers[name]

    def _replace(self, now_s: float) -> None:
        """Servers that have started, are lost, or come back."""
        begins_s, ends_s = self._outage_s
        if self._spec.outage_s and begins_s <= now_s < begins_s + _STEP_S:
            self._lose_zone(ZONES[-1])
        if ends_s <= now_s < ends_s + _STEP_S:
            for gateway in self._gateways:
                gateway.is_up = self._have_changed = True
        for one in self._servers.values():
            if not one.is_up and one.drains_since_s is None and one.ready_s <= now_s:
                one.is_up = self._have_changed = True
        chance = _STEP_S / (self._spec.days_between_failures * DAY_S)
        n_failed = self._rng.binomial(len(self._servers), chance)
        names = list(self._servers)
        failed = [self._servers[names[n]] for n in self._rng.choice(len(names), n_failed, False)]
        self._lose(failed)
        if not self._spec.scales:
            zones = ZONES[:-1] if begins_s <= now_s < ends_s else ZONES
            for zone in zones:
                have = sum(one.zone == zone for one in self._staying())
                for _ in range(self._fixed[zone] - have):
                    self._start(zone, now_s)
        self._roll_out(now_s)

    def _lose_zone(self, zone: str) -> None:
        gone = [one for one in self._gateways if one.zone == zone]
        for one in gone:
            one.is_up = False
        left = [one for one in self._gateways if one.zone != zone]
        # Their sessions are resumed at other gateways.
        for n, call in enumerate(call for one in gone for call in one.sessions):
            call.gateway = left[n % len(left)]
            call.gateway.sessions[call] = None
        for one in gone:
            one.sessions.clear()
        self._lose([one for one in self._servers.values() if one.zone == zone])

    def _lose(self, servers: Sequence[_Server]) -> None:
        for one in servers:
            del self._servers[one.name]
            one.is_up = False
        if servers:
            self._have_changed = True
            self._draw_homes()
        for one in servers:
            self._move(one.sessions, lost=True)

    def _staying(self) -> list[_Server]:
        return [one for one in self._servers.values() if one.replacement is None]

    def _roll_out(self, now_s: float) -> None:
        """A batch after the other: new servers first, then the old ones go."""
        if now_s < self._spec.rollout_s:
            return
        for one in self._servers.values():
            if one.replacement is not None and one.replacement.ready_s <= now_s:
                self._begin_drain(one, now_s)
        staying = self._staying()
        n_leaving = len(self._servers) - len(staying)
        old = [one for one in staying if one.is_up and not one.is_new]
        old.sort(key=lambda one: len(one.sessions))
        for one in old[: max(0, math.ceil(_BATCH * len(self._servers)) - n_leaving)]:
            one.replacement = self._start(one.zone, now_s)

    def _begin_drain(self, one: _Server, now_s: float) -> None:
        if one.drains_since_s is None:
            one.drains_since_s, one.is_up = now_s, False
            self._have_changed = True

    def _scale(self, now_s: float) -> None:
        if not self._spec.scales:
            return
        wish = self._scaling.wish(now_s, self._now(now_s))
        wanted, kept = set(wish.drain), self._staying()
        for one in kept:
            if one.name in wanted and one.state == "starting":
                del self._servers[one.name]
            elif one.name in wanted:
                self._begin_drain(one, now_s)
            elif one.drains_since_s is not None:
                one.drains_since_s, one.is_up, self._have_changed = None, True, True
        for zone, n in wish.hosts[_POOL].items():
            have = sum(one.zone == zone for one in kept if one.name in self._servers)
            for _ in range(n - have):
                self._start(zone, now_s)

    def _now(self, now_s: float) -> FleetNow:
        up = [one for one in self._gateways if one.is_up]
        since_s, n_calls, n_ended = self._came[0] if self._came else (now_s, 0, 0)
        span_s = max(_STEP_S, now_s - since_s) * len(up)
        arrivals_per_s = (self._n_calls - n_calls) / span_s
        ends_per_s = (self._n_ended - n_ended) / span_s
        loads = [
            GatewayLoad(
                n_open=len(one.sessions),
                limit=one.limit,
                why="full" if len(one.sessions) >= one.limit else "",
                share=one.share,
                arrivals_per_s=arrivals_per_s,
                ends_per_s=ends_per_s,
            )
            for one in up
        ]
        hosts = [
            Host(
                name=one.name, pool=_POOL, zone=one.zone, n_open=len(one.sessions), state=one.state
            )
            for one in self._staying()
        ]
        n_up = len(ZONES) - (self._outage_s[0] <= now_s < self._outage_s[1])
        return FleetNow(
            gateways=loads, stages={}, hosts=hosts, zones=ZONES[:n_up], lost=ZONES[n_up:]
        )

    def _drain(self, now_s: float) -> None:
        chance = -math.expm1(-self._quality.turns_per_s[-1] * _STEP_S)
        for one in [s for s in self._servers.values() if s.drains_since_s is not None]:
            since_s = one.drains_since_s
            if self._spec.moves and one.sessions:
                if now_s - since_s >= _DRAINED_S:
                    n = len(one.sessions)
                else:
                    n = self._rng.binomial(len(one.sessions), chance)
                self._draw_homes()
                self._move([call for call, _ in zip(one.sessions, range(n), strict=False)])
            if not one.sessions:
                self._drains_s.append(now_s - since_s)
                del self._servers[one.name]
        self._gpus_most = max(self._gpus_most, self._spec.n_gpus * len(self._servers))
        self._gpu_s += self._spec.n_gpus * len(self._servers) * _STEP_S

    def _draw_homes(self) -> None:
        """Again where servers have come or gone: a gateway connects to others on demand."""
        if not self._have_changed:
            return
        self._have_changed = False
        self._up = up = [one for one in self._servers.values() if one.is_up]
        self._gateways_up = [one for one in self._gateways if one.is_up]
        n_gateways = len(self._gateways_up)
        n_homes = max(_HOMES, math.ceil(_HOME_GATEWAYS * len(up) / n_gateways))
        n_rounds = math.ceil(n_gateways * n_homes / max(1, len(up)))
        drawn = np.concatenate([self._rng.permutation(len(up)) for _ in range(n_rounds)])
        if not up:
            drawn = np.zeros(0, int)
            n_homes = 0
        self._homes = drawn[: n_gateways * n_homes].reshape(n_gateways, n_homes)
        for gateway, numbers in zip(self._gateways_up, self._homes.tolist(), strict=True):
            gateway.homes = [up[n] for n in numbers]

    # --- turns ---

    def _serve(self, now_s: float) -> None:
        """The turns of a step, and what the gateways learn of them."""
        servers = list(self._servers.values())
        n_sessions, late_ms = self._lateness(servers)
        places = np.minimum(late_ms.astype(int), _BIN_MS - 1).ravel()
        weights = np.repeat(n_sessions, len(QUANTILES))
        self._heard += np.bincount(places, weights, _BIN_MS)
        if self._up:
            p90_ms = self._lateness(self._up)[1][:, np.searchsorted(QUANTILES, 0.9)]
            noise = np.exp(_NOISE * self._rng.standard_normal(len(self._gateways_up)))
            shares = noise * p90_ms[self._homes].mean(axis=1) / _FIRST_AUDIO_MS
            for gateway, share in zip(self._gateways_up, shares.tolist(), strict=True):
                gateway.share = share
                gateway.judge(now_s)
        for one in servers:
            one.moved *= math.exp(-_STEP_S / _REBUILT_S)

    def _lateness(self, servers: Sequence[_Server]) -> tuple[np.ndarray, np.ndarray]:
        """Sessions of each server, and its first audio in ms by QUANTILES."""
        n_sessions = np.array([len(one.sessions) for one in servers], float)
        rebuilt = np.array([one.moved for one in servers]) / np.maximum(1.0, n_sessions)
        dearer = 1 + _REBUILT * np.minimum(1.0, rebuilt)
        return n_sessions, self._quality.at(n_sessions) * dearer[:, None]

    def _day(self) -> Day:
        n = self._n_calls
        reached = np.cumsum(self._heard)
        audio_ms = [float(np.searchsorted(reached, q * reached[-1])) for q in (0.5, 0.9, 0.99)]
        drains_s = self._drains_s or [0.0]
        came, refused = self._in_outage
        return Day(
            arrivals=n,
            users_most=self._most,
            refused=100 * self._refused / n,
            refused_in_outage=100 * refused / max(1, came),
            failed=100 * self._failed / n,
            moved=100 * self._moved / n,
            of_loss=100 * self._lost / n,
            gpus_most=self._gpus_most,
            gpu_hours=self._gpu_s / 3600,
            first_audio_ms=(audio_ms[0], audio_ms[1], audio_ms[2]),
            drain_min=(
                float(np.quantile(drains_s, 0.5)) / 60,
                float(np.quantile(drains_s, 0.95)) / 60,
            ),
        )
