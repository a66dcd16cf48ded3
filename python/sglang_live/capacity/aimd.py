"""Limit of sessions that can be served in time: it rises while there is slack, and falls without.

In: share of their budgets that the slowest of the latest deadlines took. Out: a limit.
Additive increase, multiplicative decrease (Chiu and Jain 1989) as in Metronome (section 4.2), with
larger steps, in proportion to the slack, until slack has run out once. Lateness that load does not
cause must not count: that of a quiet server, of a single session, and of a short time, such as a
cold start. A limit below the first one is forgotten while nothing confirms it.
"""

import math
from dataclasses import dataclass

from sglang_live.capacity.deadlines import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class AimdConfig:
    """
    target: share of its budget that a deadline may take.
    slack: multiple of the quietest window's share that replaces target if it is larger: where few
        sessions are already late, a window is late only beyond that.
    first: limit before anything is measured.
    least: lowest limit.
    increase: rise of the limit after windows with slack in which it was reached.
    probe: sum of sessions over windows before the next rise, once slack has run out: with few
        sessions one more is much, and should be tried rarely.
    decrease: new limit, as a share of the sessions that were too many.
    passing: number of late windows in a row that are needed where more sessions have been in time
        before.
    few_s: duration of the late windows in a row that are needed where there are no more sessions
        than `first`: an engine compiles and loads while it serves its first requests, and of few
        deadlines in a window a disturbance of seconds makes most late.
    forgets: number of windows without a fall after which steps are large again.
    idle_s: time without sessions in which a limit below `first` rises by one.
    calm_s: the same with sessions whose deadlines take at most half of the target.
    """

    target: float = 1.0
    slack: float = 1.5
    first: int = 16
    least: int = 2
    increase: int = 1
    probe: int = 20
    decrease: float = 0.9
    passing: int = 3
    few_s: float = 30.0
    forgets: int = 100
    idle_s: float = 5.0
    calm_s: float = 15.0

    def __post_init__(self) -> None:
        if not 0 < self.target < float("inf") or not 1 <= self.slack < float("inf"):
            raise ValueError("target must be positive, slack at least 1")
        counts = (self.first, self.least, self.increase, self.probe, self.passing, self.forgets)
        if min(counts) < 1:
            raise ValueError("first, least, increase, probe, passing and forgets are at least 1")
        if self.few_s < 0 or not 0 < self.idle_s <= self.calm_s:
            raise ValueError("few_s is at least 0, idle_s positive and no longer than calm_s")
        if not 0 < self.decrease < 1:
            raise ValueError(f"decrease is a share below 1, got {self.decrease}")


class Aimd:
    """
    Attributes:
        limit: number of sessions that can be served in time.
    """

    def __init__(self, config: AimdConfig | None = None):
        self._config = config or AimdConfig()
        self.limit = self._config.first
        self._quiet = math.inf  # the smallest share of a window
        self._proven = 0  # most sessions of a window that was in time
        # Late windows in a row: number, duration.
        self._late = 0
        self._late_s = 0.0
        self._since_fall: int | None = None  # windows; None: never, or long ago
        self._calm = 0  # sum of sessions over windows with slack at the limit
        self._aged = 0.0  # part of the next rise by age

    def window(
        self, verdict: Verdict, n_sessions: int, n_new: int = 0, *, idle_s: float = 0.0
    ) -> None:
        """Record a window.

        Args:
            n_sessions: the most sessions in it.
            n_new: those of them whose first turn is still to come: the verdict is without it.
            idle_s: the time in it without sessions.
        """
        if self._since_fall is not None:
            self._since_fall += 1
            if self._since_fall > self._config.forgets:
                self._since_fall = None
        share = self._expected(verdict.share, n_sessions, n_new)
        if self._is_late(verdict):
            self._late += 1
            self._late_s += verdict.lasted_s
            if self._is_too_many(n_sessions):
                self._fall(n_sessions)
        else:
            self._in_time(verdict, n_sessions, share)
        is_calm = share is None or share <= self._target / 2
        self._age(idle_s, verdict.lasted_s - idle_s if is_calm else 0.0)

    def _in_time(self, verdict: Verdict, n_sessions: int, expected: float | None) -> None:
        self._late = 0
        self._late_s = 0.0
        if verdict.share is not None:
            self._quiet = min(self._quiet, verdict.share)
            self._proven = max(self._proven, n_sessions)
        if n_sessions >= self.limit:
            self.limit += self._step(expected, n_sessions)

    def _age(self, idle_s: float, calm_s: float) -> None:
        """A limit below the first one rises to it while nothing says that it has to be so low."""
        if self.limit >= self._config.first:
            return
        self._aged += idle_s / self._config.idle_s + calm_s / self._config.calm_s
        whole = int(self._aged)
        self._aged -= whole
        self.limit = min(self._config.first, self.limit + whole)
        if self.limit == self._config.first:
            # As after a start.
            self._since_fall = None
            self._aged = 0.0

    @property
    def _target(self) -> float:
        if math.isinf(self._quiet):  # no window was in time yet
            return self._config.target
        return max(self._config.target, self._config.slack * self._quiet)

    def _is_late(self, verdict: Verdict) -> bool:
        # A server with too many sessions is late in more than one of them.
        share, n_late = verdict.share, verdict.n_late_sessions
        return share is not None and share > self._target and n_late > 1

    def _is_too_many(self, n_sessions: int) -> bool:
        # Sessions are never ended, so more of them than the limit may remain, and be late.
        if not self._config.least < n_sessions <= self.limit:
            return False
        if n_sessions <= self._config.first:
            return self._late_s >= self._config.few_s
        return n_sessions >= self._config.decrease * self._proven or (
            self._late >= self._config.passing
        )

    def _fall(self, n_sessions: int) -> None:
        self.limit = max(self._config.least, int(n_sessions * self._config.decrease))
        self._proven = min(self._proven, self.limit)
        self._since_fall = 0
        self._calm = 0
        self._aged = 0.0

    @staticmethod
    def _expected(share: float | None, n_sessions: int, n_new: int) -> float | None:
        """The share once all sessions take turns: it grows at least in proportion to the load."""
        return None if share is None else share * n_sessions / max(1, n_sessions - n_new)

    def _step(self, share: float | None, n_sessions: int) -> int:
        if share is not None and share > self._target:
            return 0
        if self._since_fall is not None:
            self._calm += n_sessions
            if self._calm < self._config.probe:
                return 0
            self._calm = 0
        if self._since_fall is not None or share is None:
            return self._config.increase
        # Half of the step that would use it up if lateness grew in proportion to the load, because
        # it grows faster.
        slack = max(0.0, 1 - share / self._target)
        return max(self._config.increase, int(self.limit * slack / 2))
