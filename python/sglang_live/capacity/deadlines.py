"""Deadlines of the service: when something is due, and the share of its budget that it took.

A turn's first packet has one, its flow without gaps another, and in frame mode each frame. An
overdue deadline counts by its age: an engine that stalls is late in all sessions, although nothing
arrives that could be timed. An empty one failed, and counts as infinitely late. Flows are judged
apart: nearly all of them are in time while first packets are not, and among both a tenth would be
a fifth of the first packets.
"""

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineConfig:
    """
    quantile: quantile of a window's shares that is its verdict, of each kind.
    window_s: duration of a window.
    least: number of deadlines of a kind that a verdict needs; a window with fewer is extended.
    patience_s: longest duration of a window.
    """

    quantile: float = 0.9
    window_s: float = 5.0
    least: int = 10
    patience_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    share: largest share of its budget that a deadline took, without the slowest ones; None: there
        were no deadlines.
    n_late_sessions: sessions with a deadline as slow as that, or slower.
    """

    share: float | None
    n_late_sessions: int = 0


@dataclass(frozen=True, slots=True)
class _Due:
    session_id: str
    began_s: float
    budget_s: float
    must_come: bool

    def share(self, now_s: float) -> float:
        return (now_s - self.began_s) / self.budget_s


class Deadlines:
    def __init__(self, config: DeadlineConfig | None = None):
        self._config = config or DeadlineConfig()
        self._numbers = itertools.count()
        self._due: dict[int, _Due] = {}
        self._shares: list[tuple[float, str]] = []
        self._flows: list[tuple[float, str]] = []
        self._began_s: float | None = None

    def begin(
        self, session_id: str, now_s: float, budget_s: float, *, must_come: bool = True
    ) -> int:
        """Begin a deadline, due within budget_s. Returns its number for came(), empty() or gone().

        must_come: False if there may be nothing to come, so that it counts only if it comes.
        """
        number = next(self._numbers)
        self._due[number] = _Due(session_id, now_s, budget_s, must_come)
        return number

    def came(self, number: int, now_s: float) -> None:
        if (due := self._due.pop(number, None)) is not None:
            self.count(due.session_id, due.share(now_s))

    def empty(self, number: int) -> None:
        """Count a deadline whose work failed, or came with nothing in it."""
        if (due := self._due.pop(number, None)) is not None:
            self.count(due.session_id, math.inf)

    def gone(self, number: int) -> None:
        """Drop a deadline that has become void."""
        self._due.pop(number, None)

    def count(self, session_id: str, share: float, *, is_flow: bool = False) -> None:
        """Count a deadline that is over. is_flow: of a response's longest gap."""
        (self._flows if is_flow else self._shares).append((share, session_id))

    def verdict(self, now_s: float) -> Verdict | None:
        """Returns the verdict of the window and begins the next one; None: it is not over."""
        if self._began_s is None:
            self._began_s = now_s
        lasted_s = now_s - self._began_s
        if lasted_s < self._config.window_s:
            return None
        kinds = [self._shares + self._overdue(now_s), self._flows]
        n_most = max(map(len, kinds))
        if 0 < n_most < self._config.least and lasted_s < self._config.patience_s:
            return None
        self._began_s, self._shares, self._flows = now_s, [], []
        found = [self._verdict(shares) for shares in kinds if shares]
        return max(found, key=lambda one: one.share or 0.0, default=Verdict(None))

    def _verdict(self, shares: list[tuple[float, str]]) -> Verdict:
        """Of deadlines of one kind, at least one."""
        shares = sorted(shares)
        share, _ = shares[math.ceil(self._config.quantile * len(shares)) - 1]
        return Verdict(share, len({session_id for s, session_id in shares if s >= share}))

    def _overdue(self, now_s: float) -> list[tuple[float, str]]:
        waiting = [due for due in self._due.values() if due.must_come]
        return [(due.share(now_s), due.session_id) for due in waiting if due.share(now_s) > 1]
