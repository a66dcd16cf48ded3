"""Deadlines of the service: when something is due, and the share of its budget that it took.

A turn's first packet has one, its flow without gaps another, in frame mode each frame, and the
first token of a response without sound. An overdue deadline counts by its age, also when its turn
is given up: an engine that stalls is late in all sessions, although nothing arrives that could be
timed. An empty one failed, and counts as infinitely late. The kinds are judged apart: nearly all
flows are in time while first packets are not, and among both a tenth would be a fifth of the first
packets.
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from enum import Enum, auto


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
    lasted_s: duration of the window.
    """

    share: float | None
    n_late_sessions: int = 0
    lasted_s: float = field(default=0.0, compare=False)


class Kind(Enum):
    """Of what is due. TEXT: the first token of a response that is not heard."""

    FIRST = auto()
    FLOW = auto()
    TEXT = auto()


@dataclass(frozen=True, slots=True)
class _Due:
    session_id: str
    began_s: float
    budget_s: float
    kind: Kind

    def share(self, now_s: float) -> float:
        return (now_s - self.began_s) / self.budget_s


class Deadlines:
    def __init__(self, config: DeadlineConfig | None = None):
        self._config = config or DeadlineConfig()
        self._numbers = itertools.count()
        self._due: dict[int, _Due] = {}
        self._shares: dict[Kind, list[tuple[float, str]]] = {kind: [] for kind in Kind}
        self._began_s: float | None = None

    def begin(self, session_id: str, now_s: float, budget_s: float, kind: Kind = Kind.FIRST) -> int:
        """Begin a deadline, due within budget_s. Returns its number for came(), empty() and so on.

        kind: other than FLOW, which is known at its end only.
        """
        number = next(self._numbers)
        self._due[number] = _Due(session_id, now_s, budget_s, kind)
        return number

    def came(self, number: int, now_s: float) -> None:
        if (due := self._due.pop(number, None)) is not None:
            self.count(due.session_id, due.share(now_s), due.kind)

    def empty(self, number: int) -> None:
        """Count a deadline whose work failed, or came with nothing in it."""
        if (due := self._due.pop(number, None)) is not None:
            self.count(due.session_id, math.inf, due.kind)

    def abandoned(self, number: int, now_s: float) -> None:
        """Count a deadline by its age if it is overdue: its turn was given up."""
        if (due := self._due.pop(number, None)) is not None and due.share(now_s) > 1:
            self.count(due.session_id, due.share(now_s), due.kind)

    def gone(self, number: int) -> None:
        """Drop a deadline that has become void: there is nothing to come."""
        self._due.pop(number, None)

    def count(self, session_id: str, share: float, kind: Kind = Kind.FIRST) -> None:
        """Count a deadline that is over."""
        self._shares[kind].append((share, session_id))

    def verdict(self, now_s: float) -> Verdict | None:
        """Returns the verdict of the window and begins the next one; None: it is not over."""
        if self._began_s is None:
            self._began_s = now_s
        lasted_s = now_s - self._began_s
        if lasted_s < self._config.window_s:
            return None
        kinds = {kind: [*own, *self._overdue(kind, now_s)] for kind, own in self._shares.items()}
        n_most = max(map(len, kinds.values()))
        if 0 < n_most < self._config.least and lasted_s < self._config.patience_s:
            return None
        self._began_s = now_s
        self._shares = {kind: [] for kind in Kind}
        found = {kind: self._verdict(shares) for kind, shares in kinds.items() if shares}
        # Text in time says nothing of the time in which there would be sound.
        if Kind.TEXT in found and (found[Kind.TEXT].share or 0.0) <= 1:
            del found[Kind.TEXT]
        worst = max(found.values(), key=lambda one: one.share or 0.0, default=Verdict(None))
        return replace(worst, lasted_s=lasted_s)

    def _verdict(self, shares: list[tuple[float, str]]) -> Verdict:
        """Of deadlines of one kind, at least one."""
        shares = sorted(shares)
        share, _ = shares[math.ceil(self._config.quantile * len(shares)) - 1]
        return Verdict(share, len({session_id for s, session_id in shares if s >= share}))

    def _overdue(self, kind: Kind, now_s: float) -> list[tuple[float, str]]:
        waiting = [due for due in self._due.values() if due.kind is kind]
        return [(due.share(now_s), due.session_id) for due in waiting if due.share(now_s) > 1]
