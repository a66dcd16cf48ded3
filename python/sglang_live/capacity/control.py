"""Admission of sessions.

In: deadlines of the turns that are served, gaps that listeners heard, occupancy of the KV pools.
Out: admission, or a CapacityError with the reason; the same for /v1/capacity and /metrics.
Owner: one CapacityControl per server. It never ends an admitted session.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sglang_live.capacity.aimd import Aimd, AimdConfig
from sglang_live.capacity.deadlines import DeadlineConfig, Deadlines, Kind
from sglang_live.capacity.forecast import PoolForecast
from sglang_live.clock import Clock
from sglang_live.errors import CapacityError
from sglang_live.settings import Count, Positive, Settings, flag

# Shorter gaps are hardly noticed; the design targets count gaps from here as well.
AUDIBLE_GAP_S = 0.1
# Time for which a session that has taken no turn counts as one that will: its load is to come.
_FIRST_TURN_S = 30.0
# The limit changes within minutes, not seconds.
_RETRY_AFTER_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig(Settings):
    """
    max_sessions: upper bound of the limit.
    adapts: whether the limit is lower where more sessions cannot be served in time.
    first_token_s: budget of the first token of a response without sound, which waits behind others.
    frame_share: budget of a frame, as a share of the time until the next.
    full_share: share of a KV pool in use from which no session is admitted.
    saturates_s: nor is one with which a pool would be full within this time.
    sample_s: time between two samples of the pools.
    """

    max_sessions: Count = flag(64, "sessions at once", group="limits")
    admission_first_audio_ms: Positive = flag(
        1000.0,
        "admit fewer sessions while more than one turn in ten takes longer to its first audio",
    )
    adapts: bool = True
    first_token_s: float = 15.0
    frame_share: float = 0.5
    full_share: float = 0.95
    saturates_s: float = 30.0
    sample_s: float = 2.0
    aimd: AimdConfig = field(default_factory=AimdConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)

    @property
    def first_packet_s(self) -> float:
        """Budget of a turn's first packet, from the decision that the user's turn is over."""
        return self.admission_first_audio_ms / 1000


class Named(Protocol):
    """A replica of a stage."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The KV pool of one engine.

    share: of it that is in use. n_sessions: admitted ones that stay with the engine.
    """

    stage: str
    share: float
    n_sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """
    n_more: number of sessions that would be admitted now.
    why: reason why no more would be; "" if there is none.
    share: share of its budget that the slowest tenth of deadlines took at least, in the latest
        window with any; None: there was none yet.
    pools: (share in use, seconds until it is full) by stage, of its emptiest replica.
    n_arrived, n_ended: sessions since the start; of the first, some were refused.
    """

    n_sessions: int
    limit: int
    n_more: int
    why: str
    share: float | None
    pools: Mapping[str, tuple[float, float]]
    n_arrived: int = 0
    n_ended: int = 0


class CapacityControl:
    """
    Args:
        pools: returns the KV pools of the engines that are up, by replica.
    """

    def __init__(
        self,
        config: CapacityConfig,
        clock: Clock,
        pools: Callable[[], Mapping[str, Pool]] = dict,
    ):
        self._config = config
        self._clock = clock
        self._read_pools = pools
        self._aimd = Aimd(config.aimd)
        self._deadlines = Deadlines(config.deadlines)
        self._pools: Mapping[str, Pool] = {}
        self._forecasts: dict[str, PoolForecast] = {}  # by replica
        # The latest sample: time, sessions.
        self._sampled_s = -math.inf
        self._n_sampled = 0
        self._share: float | None = None
        self._n_sessions = self._n_most = 0  # now, and at most in this window
        self._n_arrived = self._n_ended = 0
        self._new: dict[str, float] = {}  # admission of the sessions that have taken no turn
        # Of this window, without sessions.
        self._idle_s = 0.0
        self._idle_since_s = clock.now_s()

    # --- sessions ---

    def admit(self, session_id: str) -> None:
        """Admit a session.

        Raises:
            CapacityError: if none can be admitted; it counts among the arrivals.
        """
        now = self.report()
        self._n_arrived += 1
        if not now.n_more:
            raise CapacityError(now.why, retry_after_s=_RETRY_AFTER_S)
        self._count_idle(now_s := self._clock.now_s())
        self._n_sessions += 1
        self._n_most = max(self._n_most, self._n_sessions)
        self._new[session_id] = now_s

    def turn_begins(self, session_id: str) -> None:
        """A turn of an admitted session begins, with deadlines or without."""
        self._new.pop(session_id, None)

    def release(self, session_id: str) -> None:
        self._n_sessions -= 1
        self._n_ended += 1
        self._idle_since_s = self._clock.now_s()
        self._new.pop(session_id, None)

    # --- deadlines ---

    def first_packet_due(self, session_id: str) -> int:
        """Begin the deadline of a turn. Returns its number for came(), failed() and so on."""
        budget_s = self._config.first_packet_s
        return self._deadlines.begin(session_id, self._clock.now_s(), budget_s)

    def first_token_due(self, session_id: str) -> int:
        """The same of a turn without audio."""
        budget_s = self._config.first_token_s
        return self._deadlines.begin(session_id, self._clock.now_s(), budget_s, Kind.TEXT)

    def frame_due(self, session_id: str, frame_s: float) -> int:
        """Begin the deadline of a frame; the next one follows in frame_s. Returns its number."""
        budget_s = self._config.frame_share * frame_s
        return self._deadlines.begin(session_id, self._clock.now_s(), budget_s)

    def came(self, deadline: int) -> None:
        self._deadlines.came(deadline, self._clock.now_s())
        self._update()

    def failed(self, deadline: int) -> None:
        """Count a deadline before which the turn failed. No effect if it came."""
        self._deadlines.empty(deadline)

    def abandoned(self, deadline: int) -> None:
        """Count a deadline of a turn that was given up, if it is overdue. No effect if it
        came."""
        self._deadlines.abandoned(deadline, self._clock.now_s())

    def gone(self, deadline: int) -> None:
        """Drop a deadline before which there is nothing to come. No effect if it came."""
        self._deadlines.gone(deadline)

    def flowed(self, session_id: str, gap_s: float) -> None:
        """Count the flow of a response. gap_s: its listener's longest wait for the server."""
        self._deadlines.count(session_id, gap_s / AUDIBLE_GAP_S, Kind.FLOW)
        self._update()

    # --- capacity ---

    def report(self) -> Capacity:
        self._update()
        n, config = self._n_sessions, self._config
        limit = min(self._aimd.limit, config.max_sessions) if config.adapts else config.max_sessions
        why, n_more = "", max(0, limit - n)
        if not n_more:
            why = f"{n} of {config.max_sessions} sessions"
            if limit < config.max_sessions:
                why = f"{n} sessions, and {limit} can be served in time"
        emptiest: dict[str, PoolForecast] = {}
        for name, forecast in self._forecasts.items():
            other = emptiest.setdefault(stage := self._pools[name].stage, forecast)
            if forecast.share < other.share:
                emptiest[stage] = forecast
        for stage, forecast in emptiest.items() if config.adapts else ():
            n_fit = self._room_of(stage)
            if n_fit < n_more:
                n_more, why = int(n_fit), "" if n_fit else self._why_full(stage, forecast)
        pools = {
            stage: (forecast.share, forecast.saturates_in_s())
            for stage, forecast in emptiest.items()
        }
        return Capacity(
            n_sessions=n,
            limit=limit,
            n_more=n_more,
            why=why,
            share=self._share,
            pools=pools,
            n_arrived=self._n_arrived,
            n_ended=self._n_ended,
        )

    def has_room_in(self, replica: Named) -> bool:
        """Whether its KV pool has room for another session, by the latest sample."""
        return replica.name not in self._forecasts or self._room_in(replica.name) > 0

    def _room_of(self, stage: str) -> float:
        """Sessions that the replicas of a stage have room for; new ones go where there is some."""
        rooms = (self._room_in(name) for name, pool in self._pools.items() if pool.stage == stage)
        return max(0, sum(rooms) - max(0, self._n_sessions - self._n_sampled))

    def _room_in(self, replica: str) -> float:
        forecast = self._forecasts[replica]
        if forecast.share >= self._config.full_share:
            return 0
        most = forecast.most_sessions(self._config.saturates_s)
        return most if math.isinf(most) else max(0, int(most) - self._pools[replica].n_sessions)

    def _why_full(self, stage: str, forecast: PoolForecast) -> str:
        if forecast.share >= self._config.full_share:
            return f"the {stage}'s KV pool is {100 * forecast.share:.0f} % full"
        in_s = forecast.saturates_in_s(forecast.n_sessions + 1)
        return f"the {stage}'s KV pool would be full in {in_s:.0f} s"

    def _update(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._sampled_s >= self._config.sample_s:
            self._sampled_s = now_s
            self._pools = dict(self._read_pools())
            self._n_sampled = self._n_sessions
            known = self._forecasts
            self._forecasts = {name: known.get(name, PoolForecast()) for name in self._pools}
            for name, forecast in self._forecasts.items():
                forecast.observe(now_s, self._pools[name].share, self._pools[name].n_sessions)
        if (verdict := self._deadlines.verdict(now_s)) is not None:
            self._share = self._share if verdict.share is None else verdict.share
            n_new = sum(now_s - admitted_s <= _FIRST_TURN_S for admitted_s in self._new.values())
            self._count_idle(now_s)
            self._aimd.window(verdict, self._n_most, n_new, idle_s=self._idle_s)
            self._n_most = self._n_sessions
            self._idle_s = 0.0

    def _count_idle(self, now_s: float) -> None:
        if not self._n_sessions:
            self._idle_s += now_s - self._idle_since_s
            self._idle_since_s = now_s
