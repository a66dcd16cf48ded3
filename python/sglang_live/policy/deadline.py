"""VoxServe (Kamahori et al.) section 3.2.1: first sounds first, but few at a time.

A stream in startup has not sounded. A steady one has a soft deadline, the end of its buffer, and
is critical within a second of it; the others' slack is what the startups run on.
"""

import numpy as np

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.urgency import overdue
from sglang_live.policy.view import U1, StageView


def order(view: StageView, urgency: np.ndarray, config: PolicyConfig) -> np.ndarray:
    """Waiting streams: startups by age, at most as many as may start; then the nearest deadline.

    Unknown streams, and steady ones that waited for long, stand among the startups by age.
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
    return ordered[may_start | ~starts]


def n_in_startup(view: StageView, urgency: np.ndarray, config: PolicyConfig) -> int:
    """Streams with KV on their way to their first sound."""
    starting = (urgency == U1) & ~view.waiting
    starting &= view.since_s > view.now_s - config.max_startup_s
    return int(np.count_nonzero(starting))
