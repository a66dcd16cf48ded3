"""How many lines of batches may run now, beside the users who wait for what they hear.

In: the sessions of the server. Out: a number. Pure: this is the one place that decides it. What
runs is flex, which the stages' own policies defer behind everything that is heard.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    n_sessions: sessions of users and of single requests; lines of batches have none.
    n_more: further sessions that the server would admit now.
    """

    n_sessions: int
    n_more: int


def lines_at_once(load: Load, most: int) -> int:
    """The number of lines that may run at the same time.

    The share of the server's sessions that is free decides: all of `most` on an idle server, none
    on a full one, else at least one.
    """
    if load.n_more <= 0:
        return 0
    return max(1, most * load.n_more // (load.n_more + load.n_sessions))
