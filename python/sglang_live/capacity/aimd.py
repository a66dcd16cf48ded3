"""How many sessions can be served in time: more while there is slack, fewer when there is none.

In: how much of their budgets the slow ones among the latest beats took. Out: a limit.
Additive increase, multiplicative decrease (Chiu and Jain 1989) as Metronome has it (section 4.2),
with longer steps until the end of the slack was seen: by as much as is left of it. Lateness that
is not the load's must not count: what a quiet server is late by, what hits a single caller, and
what passes.
"""

import math
from dataclasses import dataclass

from sglang_live.capacity.deadlines import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class AimdConfig:
    """
    target: share of its budget that a beat may take.
    slack: times what the quietest window took, if that is more: where even few are late, more is
        late when it is later than that.
    first: sessions there may be before anything was seen. least: there may always be so many.
    increase: sessions more after windows with slack in which the limit was reached.
    probe: so many sessions' windows, once slack has run out: where there are few, one more is
        much, and should not be tried all the time.
    decrease: of the sessions that were too many.
    passing: so many windows in a row must be late, if more sessions than these were in time before.
    forgets: after so many windows without a cut, steps are long again.
    """

    target: float = 1.0
    slack: float = 1.5
    first: int = 16
    least: int = 2
    increase: int = 1
    probe: int = 20
    decrease: float = 0.9
    passing: int = 3
    forgets: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.target < float("inf") or not 1 <= self.slack < float("inf"):
            raise ValueError("target must be positive, slack at least 1")
        counts = (self.first, self.least, self.increase, self.probe, self.passing, self.forgets)
        if min(counts) < 1:
            raise ValueError("first, least, increase, probe, passing and forgets are at least 1")
        if not 0 < self.decrease < 1:
            raise ValueError(f"decrease is a share below 1, got {self.decrease}")


class Aimd:
    """
    Attributes:
        limit: sessions there may be.
    """

    def __init__(self, config: AimdConfig | None = None):
        self._config = config or AimdConfig()
        self.limit = self._config.first
        self._quiet = math.inf  # the least that a window took
        self._proven = 0  # the most sessions that were in time
        self._late = 0  # windows in a row
        self._since_compaction: int | None = None  # windows; None: never, or long ago
        self._calm = 0  # sessions' windows with slack at the limit

    def window(self, verdict: Verdict, n_sessions: int) -> None:
        """A window is over. n_sessions: the most there were in it."""
        if self._since_compaction is not None:
            self._since_compaction += 1
            if self._since_compaction > self._config.forgets:
                self._since_compaction = None
        if self._is_late(verdict):
            self._late += 1
            if self._is_too_many(n_sessions):
                self._cut(n_sessions)
            return
        self._late = 0
        if verdict.share is not None:
            self._quiet = min(self._quiet, verdict.share)
            self._proven = max(self._proven, n_sessions)
        if n_sessions >= self.limit:
            self.limit += self._step(verdict.share, n_sessions)

    @property
    def _target(self) -> float:
        if math.isinf(self._quiet):  # nothing came in time yet
            return self._config.target
        return max(self._config.target, self._config.slack * self._quiet)

    def _is_late(self, verdict: Verdict) -> bool:
        # A server with too many callers is late with more than one of them.
        share, n_late = verdict.share, verdict.n_late_sessions
        return share is not None and share > self._target and n_late > 1

    def _is_too_many(self, n_sessions: int) -> bool:
        # Nobody is hung up on, so what more than the limit cannot do says nothing about it.
        if not self._config.least < n_sessions <= self.limit:
            return False
        return n_sessions >= self._config.decrease * self._proven or (
            self._late >= self._config.passing
        )

    def _cut(self, n_sessions: int) -> None:
        self.limit = max(self._config.least, int(n_sessions * self._config.decrease))
        self._proven = min(self._proven, self.limit)
        self._since_compaction, self._calm = 0, 0

    def _step(self, share: float | None, n_sessions: int) -> int:
        if self._since_compaction is not None:
            self._calm += n_sessions
            if self._calm < self._config.probe:
                return 0
            self._calm = 0
        if self._since_compaction is not None or share is None:
            return self._config.increase
        # Half of what would use it up if lateness grew in proportion to the load: it grows faster.
        slack = max(0.0, 1 - share / self._target)
        return max(self._config.increase, int(self.limit * slack / 2))
