"""Whether one more caller may come.

In: beats of the turns that are served, gaps that listeners heard, how full the KV pools are.
Out: yes, or a CapacityError that says why; the same for /v1/capacity and /metrics.
Owner: one CapacityControl per server. Calls that were let in are never ended by it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sglang_live.capacity.aimd import Aimd, AimdConfig
from sglang_live.capacity.deadlines import DeadlineConfig, Deadlines
from sglang_live.capacity.forecast import PoolForecast
from sglang_live.clock import Clock
from sglang_live.errors import CapacityError

# Gaps that are shorter than this are hardly noticed; design targets count from there, too.
AUDIBLE_GAP_S = 0.1
# The limit moves in minutes rather than seconds.
_RETRY_AFTER_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """
    max_sessions: there are never more.
    adapts: fewer, as soon as more could not be served in time. False: max_sessions is all.
    first_packet_s: budget of a turn's first packet, from the decision that the caller is done.
    frame_share: budget of a frame, as a share of the time until the next.
    full_share: of a KV pool that leaves no room for another caller.
    saturates_s: neither does one that would be full within so many seconds.
    sample_s: between two looks at the pools.
    """

    max_sessions: int
    adapts: bool = True
    first_packet_s: float = 1.0
    frame_share: float = 0.5
    full_share: float = 0.95
    saturates_s: float = 30.0
    sample_s: float = 2.0
    aimd: AimdConfig = field(default_factory=AimdConfig)
    beats: DeadlineConfig = field(default_factory=DeadlineConfig)

    def __post_init__(self) -> None:
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions must be at least 1, got {self.max_sessions}")
        if not 0 < self.first_packet_s < math.inf:
            raise ValueError(f"first_packet_s must be positive, got {self.first_packet_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """
    n_more: sessions that may come now. why: what keeps it from more; "" if nothing does.
    share: of its budget that the slow tenth of beats took in the latest window with any.
    pools: by stage, (share in use, seconds until it is full).
    """

    n_sessions: int
    limit: int
    n_more: int
    why: str
    share: float | None
    pools: Mapping[str, tuple[float, float]]


class CapacityControl:
    """
    Args:
        pools: shares of the stages' KV pools in use, by stage.
    """

    def __init__(
        self,
        config: CapacityConfig,
        clock: Clock,
        pools: Callable[[], Mapping[str, float]] = dict,
    ):
        self._config, self._clock, self._read_pools = config, clock, pools
        self._aimd = Aimd(config.aimd)
        self._deadlines = Deadlines(config.beats)
        self._forecasts: dict[str, PoolForecast] = {}
        self._sampled_s = -math.inf
        self._share: float | None = None
        self._n_sessions = self._n_most = 0  # now, and the most in this window

    # --- sessions ---

    def take(self) -> None:
        """One session more.

        Raises:
            CapacityError: there may not be one; nothing was changed.
        """
        now = self.report()
        if not now.n_more:
            raise CapacityError(now.why, retry_after_s=_RETRY_AFTER_S)
        self._n_sessions += 1
        self._n_most = max(self._n_most, self._n_sessions)

    def give_back(self) -> None:
        self._n_sessions -= 1

    # --- what is due ---

    def first_packet_due(self, session_id: str, *, must_come: bool = True) -> int:
        """A turn begins. Returns a number for one of the next three.

        must_come: False if the reply may be silent, as a call of a function is.
        """
        budget_s = self._config.first_packet_s
        return self._deadlines.begin(session_id, self._clock.now_s(), budget_s, must_come=must_come)

    def frame_due(self, session_id: str, frame_s: float) -> int:
        """A frame came; the next will in frame_s. Returns a number for one of the next three."""
        budget_s = self._config.frame_share * frame_s
        return self._deadlines.begin(session_id, self._clock.now_s(), budget_s)

    def came(self, beat: int) -> None:
        self._deadlines.came(beat, self._clock.now_s())
        self._look()

    def failed(self, beat: int) -> None:
        """The turn failed before it; nothing happens if it came."""
        self._deadlines.empty(beat)

    def gone(self, beat: int) -> None:
        """Nobody waits for it any more; nothing happens if it came."""
        self._deadlines.gone(beat)

    def flowed(self, session_id: str, gap_s: float) -> None:
        """An answer is over. gap_s: the longest that its listener had to wait for us within it."""
        self._deadlines.count(session_id, gap_s / AUDIBLE_GAP_S)
        self._look()

    # --- what there is room for ---

    def report(self) -> Capacity:
        self._look()
        n, config = self._n_sessions, self._config
        limit = min(self._aimd.limit, config.max_sessions) if config.adapts else config.max_sessions
        why, n_more = "", max(0, limit - n)
        if not n_more:
            why = f"{n} of {config.max_sessions} sessions"
            if limit < config.max_sessions:
                why = f"{n} sessions, and {limit} can be served in time"
        for stage, forecast in self._forecasts.items() if config.adapts else ():
            n_fit = self._room_in(forecast)
            if n_fit < n_more:
                n_more, why = n_fit, "" if n_fit else self._why_full(stage, forecast)
        pools = {
            stage: (forecast.share, forecast.saturates_in_s())
            for stage, forecast in self._forecasts.items()
        }
        return Capacity(
            n_sessions=n, limit=limit, n_more=n_more, why=why, share=self._share, pools=pools
        )

    def _room_in(self, forecast: PoolForecast) -> float:
        if forecast.share >= self._config.full_share:
            return 0
        most = forecast.most_sessions(self._config.saturates_s)
        return most if math.isinf(most) else max(0, int(most) - self._n_sessions)

    def _why_full(self, stage: str, forecast: PoolForecast) -> str:
        if forecast.share >= self._config.full_share:
            return f"the {stage}'s KV pool is {100 * forecast.share:.0f} % full"
        in_s = forecast.saturates_in_s(self._n_sessions + 1)
        return f"the {stage}'s KV pool would be full in {in_s:.0f} s"

    def _look(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._sampled_s >= self._config.sample_s:
            self._sampled_s = now_s
            for stage, share in self._read_pools().items():
                forecast = self._forecasts.setdefault(stage, PoolForecast())
                forecast.saw(now_s, share, self._n_sessions)
        if (verdict := self._deadlines.verdict(now_s)) is not None:
            self._share = self._share if verdict.share is None else verdict.share
            self._aimd.window(verdict, self._n_most)
            self._n_most = self._n_sessions
