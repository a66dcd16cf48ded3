"""How many lines of batches may run now, beside the users who wait for what they hear.

In: the sessions of the server, and what its engines say of best-effort work. Out: a number. Pure:
this is the one place that decides it.

An engine that tells best-effort work takes as much of it as its listeners leave room for,
and tells what waits in it. It gets more lines while it takes all that it has, and fewer while some
wait: the number in flight that Little's law asks for is then found without knowing the time of a
line. Other engines only defer flex behind what is heard, so there the free share of the sessions
decides.
"""

from dataclasses import dataclass

from sglang_live.capacity.best_effort import BestEffort

# Lines at a time where the engines do not say what they take.
MOST_UNTOLD = 8
_FIRST = 4
# Work that may wait in the engines, as a share of what runs there: enough to begin at once when a
# response ends, between two reports.
_WAITING_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    n_sessions: sessions of users and of single requests; lines of batches have none.
    n_more: further sessions that the server would admit now.
    best_effort: None: the engines do not say.
    """

    n_sessions: int
    n_more: int
    best_effort: BestEffort | None = None


def lines_at_once(load: Load, most: int, before: int, n_running: int) -> int:
    """The number of lines that may run at the same time.

    Args:
        most: the largest number.
        before: what this function returned last; 0: nothing yet.
        n_running: lines that run now.
    """
    if load.best_effort is not None:
        return min(most, max(1, _taken(load.best_effort, before or _FIRST, n_running)))
    if load.n_more <= 0:
        return 0
    most = min(most, MOST_UNTOLD)
    return max(1, most * load.n_more // (load.n_more + load.n_sessions))


def _taken(now: BestEffort, before: int, n_running: int) -> int:
    spare = _WAITING_SHARE * max(4, now.n_running)
    if now.n_waiting <= spare:
        # More only if all of them are used: else a short batch would raise it without end.
        return before + max(1, before // 2) if n_running >= before else before
    return before - max(1, int((now.n_waiting - spare) / 2))
