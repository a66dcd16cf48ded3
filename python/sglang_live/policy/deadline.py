"""Order of VoxServe (Kamahori et al.), section 3.2.1: first sounds first, a few at a time.

A stream in startup has not sounded. A steady stream has a soft deadline, the end of its buffer, and
is critical within a second of it; startups use the time that the other steady streams can spare.
"""

import numpy as np

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.urgency import overdue
from sglang_live.policy.view import U1, Bools, Classes, Ints, StageView


def order(view: StageView, urgency: Classes, config: PolicyConfig) -> Ints:
    """Returns waiting streams: startups by age, as many as may start, then by nearest deadline.

    Unknown streams, and steady ones that have waited for long, are ordered among the startups.
    """
    waiting = view.waiting.nonzero()[0]
    if not len(waiting):
        return waiting
    rank = np.abs(urgency[waiting]) != U1
    rank &= ~overdue(view, waiting, config.max_wait_s)
    key = np.where(rank, view.buffered_s[waiting], view.arrived_s[waiting])
    ordered = waiting[np.lexsort((key, rank))]
    starts = (urgency[ordered] == U1) & view.managed[ordered]
    may_start = np.cumsum(starts) <= config.n_startup_max - n_in_startup(view, urgency, config)
    kept: Bools = may_start | ~starts
    return ordered[kept]


def n_in_startup(view: StageView, urgency: Classes, config: PolicyConfig) -> int:
    """Returns the number of streams with KV on their way to their first sound."""
    starting = (urgency == U1) & ~view.waiting
    starting &= view.since_s > view.now_s - config.max_startup_s
    return int(np.count_nonzero(starting))
