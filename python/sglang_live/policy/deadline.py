"""Order of VoxServe (Kamahori et al.), section 3.2.1: first sounds first, a few at a time.

A stream in startup has not sounded. A steady stream has a soft deadline, the end of its buffer, and
is critical within a second of it; startups use the time that the other steady streams can spare.
"""

from dataclasses import dataclass

import numpy as np

from sglang_live.policy.admission import overdue
from sglang_live.policy.view import U1, Bools, Classes, Ints, StageView
from sglang_live.settings import Count, Positive, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineConfig(Settings):
    """
    critical_s: a stream with a smaller buffer risks missing its deadline.
    n_startup_max: streams at once on their way to their first sound.
    max_startup_s: a stream that takes longer is stuck, and does not count among them.
    """

    critical_s: Positive = 1.0
    n_startup_max: Count = 8
    max_startup_s: Positive = 5.0


def order(view: StageView, urgency: Classes, config: DeadlineConfig, max_wait_s: float) -> Ints:
    """Returns waiting streams: startups by age, as many as may start, then by nearest deadline.

    Unknown streams, and steady ones that have waited for long, are ordered among the startups.
    """
    waiting = view.waiting.nonzero()[0]
    if not len(waiting):
        return waiting
    rank = np.abs(urgency[waiting]) != U1
    rank &= ~overdue(view, waiting, max_wait_s)
    key = np.where(rank, view.buffered_s[waiting], view.arrived_s[waiting])
    ordered = waiting[np.lexsort((key, rank))]
    starts = (urgency[ordered] == U1) & view.managed[ordered]
    may_start = np.cumsum(starts) <= config.n_startup_max - n_in_startup(view, urgency, config)
    kept: Bools = may_start | ~starts
    return ordered[kept]


def n_in_startup(view: StageView, urgency: Classes, config: DeadlineConfig) -> int:
    """Returns the number of streams with KV on their way to their first sound."""
    starting = (urgency == U1) & ~view.waiting
    starting &= view.since_s > view.now_s - config.max_startup_s
    return int(np.count_nonzero(starting))
