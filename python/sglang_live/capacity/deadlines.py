"""Deadlines of the service: when something is due, and the share of its budget that it took.

A turn's first packet is one, its flow without gaps another, in frame mode each frame. A beat that
is due and does not come counts by its age: an engine that stalls is late with everybody, and must
not look fast because nothing arrives that could be timed. An empty one never came at all.
"""

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineConfig:
    """
    quantile: of a window's beats is its verdict.
    window_s: of time; least: of beats that make a verdict. A window with fewer goes on, up to
        patience_s.
    """

    quantile: float = 0.9
    window_s: float = 5.0
    least: int = 10
    patience_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    share: of their budgets that all but the slowest beats took at most; None: there were no beats.
    n_late_sessions: sessions with a beat as slow as that, or slower.
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
        self._began_s: float | None = None

    def begin(
        self, session_id: str, now_s: float, budget_s: float, *, must_come: bool = True
    ) -> int:
        """Something is due within budget_s. Returns its number, for one of the next three.

        must_come: False: it may turn out that there is nothing, so only what comes is timed.
        """
        number = next(self._numbers)
        self._due[number] = _Due(session_id, now_s, budget_s, must_come)
        return number

    def came(self, number: int, now_s: float) -> None:
        if (due := self._due.pop(number, None)) is not None:
            self.count(due.session_id, due.share(now_s))

    def empty(self, number: int) -> None:
        """It failed, or came with nothing in it."""
        if (due := self._due.pop(number, None)) is not None:
            self.count(due.session_id, math.inf)

    def gone(self, number: int) -> None:
        """Nobody waits for it any more."""
        self._due.pop(number, None)

    def count(self, session_id: str, share: float) -> None:
        self._shares.append((share, session_id))

    def verdict(self, now_s: float) -> Verdict | None:
        """Of the window, once it is over; then the next one begins."""
        if self._began_s is None:
            self._began_s = now_s
        lasted_s = now_s - self._began_s
        if lasted_s < self._config.window_s:
            return None
        shares = sorted(self._shares + self._overdue(now_s))
        if 0 < len(shares) < self._config.least and lasted_s < self._config.patience_s:
            return None
        self._began_s, self._shares = now_s, []
        if not shares:
            return Verdict(None)
        share, _ = shares[math.ceil(self._config.quantile * len(shares)) - 1]
        return Verdict(share, len({session_id for s, session_id in shares if s >= share}))

    def _overdue(self, now_s: float) -> list[tuple[float, str]]:
        waiting = [due for due in self._due.values() if due.must_come]
        return [(due.share(now_s), due.session_id) for due in waiting if due.share(now_s) > 1]
