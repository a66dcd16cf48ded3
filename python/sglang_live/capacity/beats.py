"""Beats of the service: moments at which something is due, and what share of its budget each took.

A turn's first packet is one, a frame of a duplex session another. A beat that is due and does not
come counts by its age: an engine that stalls is late with everybody, and must not look fast because
nothing arrives that could be timed. An empty one never came at all.
"""

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatsConfig:
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
    """share: of their budgets that all but the slowest took at most; None: there were no beats."""

    share: float | None


class Beats:
    def __init__(self, config: BeatsConfig | None = None):
        self._config = config or BeatsConfig()
        self._numbers = itertools.count()
        self._due: dict[int, tuple[float, float]] = {}  # when it began, its budget
        self._shares: list[float] = []
        self._began_s: float | None = None
        self.n_beats = self.n_empty = 0

    def begin(self, now_s: float, budget_s: float) -> int:
        """Something is due within budget_s. Returns its number, for one of the next three."""
        number = next(self._numbers)
        self._due[number] = (now_s, budget_s)
        return number

    def came(self, number: int, now_s: float) -> None:
        if (due := self._due.pop(number, None)) is not None:
            began_s, budget_s = due
            self.count((now_s - began_s) / budget_s)

    def empty(self, number: int) -> None:
        """It came with nothing in it."""
        if self._due.pop(number, None) is not None:
            self.n_empty += 1
            self.count(math.inf)

    def gone(self, number: int) -> None:
        """Nobody waits for it any more."""
        self._due.pop(number, None)

    def count(self, share: float) -> None:
        self.n_beats += 1
        self._shares.append(share)

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
        return Verdict(shares[math.ceil(self._config.quantile * len(shares)) - 1])

    def _overdue(self, now_s: float) -> list[float]:
        ages = ((now_s - began_s) / budget_s for began_s, budget_s in self._due.values())
        return [share for share in ages if share > 1]
