"""How two KV pools divide the memory of one device: how many granules move, and which way.

A pool that needs more than it has receives what the other one does not use. A pool gives no more
than it has above the largest need of the last minute, so that bursts find their memory in place,
and returns what it has received when it has not needed it for as long.
Pure: views in, a Move out. Source: SwiftCache, section 4.2 (elastic cache): ScaleUp by the missing
blocks, ScaleDown by those above the largest need of an interval.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """
    elastic_window_s: time for which the largest need of a pool counts. Turns of a conversation
        follow each other within seconds, so a minute shows what a pool needs.
    slack_share: share of a pool that idle sessions leave free, so that new ones find room. It also
        keeps memory from moving to and fro.
    least_share: moves for idle sessions are at least this share of both pools: each costs both
        engines a round.
    """

    elastic_window_s: float = 60.0
    slack_share: float = 0.125
    least_share: float = 0.03125

    def __post_init__(self) -> None:
        if self.elastic_window_s <= 0:
            raise ValueError(f"elastic_window_s must be positive, got {self.elastic_window_s}")
        if not 0 < self.least_share <= self.slack_share < 1:
            raise ValueError("0 < least_share <= slack_share < 1 is required")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool, in granules.

    Attributes:
        size: what it has.
        start: what it had when both engines started.
        floor: what it always keeps.
        limit: what its address space can hold.
        needed: of running and waiting requests now.
        wished: the same, and the KV of idle sessions.
        peak_needed, peak_wished: the largest of both within the window, with the output that
            running requests may still have written.
    """

    size: int
    start: int
    floor: int
    limit: int
    needed: int
    wished: int
    peak_needed: int
    peak_wished: int


@dataclass(frozen=True, slots=True)
class Move:
    """
    Attributes:
        receiver: index of the pool that receives; the other one gives.
        granules: how many.
        urgent: requests wait for them: the giver evicts idle sessions for it.
    """

    receiver: int
    granules: int
    urgent: bool


class PeakWindow:
    """The largest of the values within the last window_s."""

    def __init__(self, window_s: float):
        self._window_s = window_s
        self._falling: deque[tuple[float, int]] = deque()  # values that nothing later exceeds

    def add(self, now_s: float, value: int) -> None:
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now_s, value))

    def peak(self, now_s: float) -> int:
        """0 if there is none. The newest value counts, however old it is."""
        while len(self._falling) > 1 and self._falling[0][0] < now_s - self._window_s:
            self._falling.popleft()
        return self._falling[0][1] if self._falling else 0


def spare_for_requests(pool: PoolView) -> int:
    """What a pool can give to waiting requests of the other one."""
    return max(0, pool.size - max(pool.floor, pool.peak_needed))


def spare_for_sessions(pool: PoolView, config: ElasticConfig) -> int:
    """What a pool can give without evicting its idle sessions soon."""
    return max(0, pool.size - max(pool.floor, _with_slack(pool.peak_wished, config)))


def decide(pools: tuple[PoolView, PoolView], config: ElasticConfig) -> Move | None:
    """The most urgent move, or None if none is of use.

    Requests that wait come first, then idle sessions whose pool is nearly full, then the return of
    what a pool has received and not needed since.
    """
    lacks = [pool.needed - pool.size for pool in pools]
    receiver = 0 if lacks[0] >= lacks[1] else 1
    if lacks[receiver] > 0:
        to, giver = pools[receiver], pools[1 - receiver]
        n = min(lacks[receiver], spare_for_requests(giver), to.limit - to.size)
        return Move(receiver, n, urgent=True) if n > 0 else None
    least = max(1, int(config.least_share * (pools[0].size + pools[1].size)))
    for receiver in (0, 1):
        to, giver = pools[receiver], pools[1 - receiver]
        wanted = _with_slack(to.wished, config) - to.size
        spare = min(spare_for_sessions(giver, config), to.limit - to.size)
        if wanted > 0 and spare >= least:
            return Move(receiver, min(max(wanted, least), spare), urgent=False)
    for receiver in (0, 1):
        to, giver = pools[receiver], pools[1 - receiver]
        n = min(giver.size - giver.start, spare_for_sessions(giver, config) - least)
        if to.size < to.start and n >= least:
            return Move(receiver, min(n, to.start - to.size), urgent=False)
    return None


def _with_slack(granules: int, config: ElasticConfig) -> int:
    return int(granules / (1 - config.slack_share))
