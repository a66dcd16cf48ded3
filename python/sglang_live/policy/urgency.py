"""Urgency classes of streams, and the order in which waiting streams are served.

LiveServe (arXiv 2606.22983) section 4: U0 may fall silent, U1 has not sounded yet, U2 has time.
"""

import numpy as np

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import U0, U1, U2, Bools, Classes, Floats, Ints, StageView

UNKNOWN = -1
_BEHIND_U1 = U1 + 0.5


def classify(view: StageView, safe_s: float) -> tuple[Classes, int]:
    """
    Args:
        safe_s: P_safe.
    Returns:
        int8 [n] classes, and how many of them are UNKNOWN.
    """
    # bool as int8: U1 where the consumer has not begun, else U2; minus two where the buffer is low.
    # A comparison with nan is False.
    dry = view.buffered_s <= safe_s
    dry &= view.started
    urgency = view.started.view(np.int8) + np.int8(U1)
    urgency -= dry.view(np.int8) << np.int8(1)
    unmanaged = ~view.managed
    if np.count_nonzero(unmanaged):
        # Without a listener a stream neither falls silent nor waits for a first sound.
        urgency[unmanaged] = U2
        unmanaged &= view.waiting
        if view.background is not None:
            unmanaged &= ~view.background
        urgency[unmanaged] = U1
    unknown = np.isnan(view.buffered_s)
    if not np.count_nonzero(unknown):
        return urgency, 0
    # Before its consumer begins there is no telemetry: a stream in the queue is U1.
    unknown &= view.managed & (view.started | ~view.waiting)
    urgency[unknown] = UNKNOWN
    return urgency, int(np.count_nonzero(unknown))


def utility(view: StageView, which: Ints, config: PolicyConfig) -> Floats:
    """Returns the utility of streams of U2: KV they will free, minus speech they may waste.

    Without a listener there is no speech to waste.
    """
    exposure = np.maximum(0.0, view.buffered_s[which] - config.p_safe_s) / config.p_safe_s
    exposure = np.where(view.managed[which], exposure, 0.0)
    return config.beta * view.kv_tokens[which] * view.occupancy - config.alpha * exposure


def order(view: StageView, urgency: Classes, config: PolicyConfig) -> Ints:
    """Returns waiting streams in the order of Algorithm 1: U0 by buffer, U1 by age, U2 by utility.

    Unknown streams are ordered among U1, by age as in SGLang. So are streams of U2 that have waited
    for long, because their utility may never be the highest. Streams without a listener are behind
    U1, by age, and among it once they have waited for long.
    """
    waiting = view.waiting.nonzero()[0]
    if len(waiting) < 2:
        return waiting
    rank = np.abs(urgency[waiting]).astype(np.float64)  # UNKNOWN as U1
    key = view.arrived_s[waiting]
    unmanaged = ~view.managed[waiting]
    if np.count_nonzero(unmanaged):
        rank[unmanaged & ~overdue(view, waiting, config.max_wait_s)] = _BEHIND_U1
    if np.count_nonzero(rank != U1):
        rank[(rank == U2) & overdue(view, waiting, config.max_wait_s)] = U1
        key = np.where(rank == U0, view.buffered_s[waiting], key)
        key = np.where(rank == U2, -utility(view, waiting, config), key)
    return waiting[np.lexsort((key, rank))]


def in_turn(view: StageView, ordered: Ints, urgency: Classes, config: PolicyConfig) -> Ints:
    """Returns `ordered` without background streams while another stream is in need."""
    if view.background is None or not np.count_nonzero(view.background[ordered]):
        return ordered
    put_off = view.background[ordered] & ~overdue(view, ordered, config.max_wait_s)
    in_need = urgency.view(np.uint8) <= U1  # UNKNOWN is 255 here
    running = in_need & view.managed & ~view.waiting
    if np.count_nonzero(running) or np.count_nonzero(in_need[ordered[~put_off]]):
        return ordered[~put_off]
    return ordered


def overdue(view: StageView, waiting: Ints, limit_s: float) -> Bools:
    """Returns which of the waiting streams have waited for longer than the limit."""
    return view.now_s - view.since_s[waiting] > limit_s
