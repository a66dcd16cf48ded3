"""Who is urgent, and in which order the waiting are served.

LiveServe (arXiv 2606.22983) section 4: U0 may fall silent, U1 has not sounded yet, U2 has time.
"""

import numpy as np

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import U0, U1, U2, StageView

UNKNOWN = -1
_BEHIND_U1 = U1 + 0.5


def classify(view: StageView, safe_s: float) -> tuple[np.ndarray, int]:
    """
    Args:
        safe_s: P_safe.
    Returns:
        int8 [n] classes, and how many of them are UNKNOWN.
    """
    # bool as int8: U1 where nobody has begun to listen, else U2, less two where the buffer is low.
    # A comparison with nan is False.
    dry = view.buffered_s <= safe_s
    dry &= view.started
    urgency = view.started.view(np.int8) + np.int8(U1)
    urgency -= dry.view(np.int8) << np.int8(1)
    unmanaged = ~view.managed
    if np.count_nonzero(unmanaged):
        # Nobody listens to these: they neither fall silent nor wait for a first sound.
        urgency[unmanaged] = U2
        unmanaged &= view.waiting
        if view.background is not None:
            unmanaged &= ~view.background
        urgency[unmanaged] = U1
    unknown = np.isnan(view.buffered_s)
    if not np.count_nonzero(unknown):
        return urgency, 0
    # Without a consumer yet there is nothing to know: who waits for the first time is U1.
    unknown &= view.managed & (view.started | ~view.waiting)
    urgency[unknown] = UNKNOWN
    return urgency, int(np.count_nonzero(unknown))


def utility(view: StageView, which: np.ndarray, config: PolicyConfig) -> np.ndarray:
    """Worth of serving streams of U2 next: KV they will free, less speech they may waste."""
    exposure = np.maximum(0.0, view.buffered_s[which] - config.p_safe_s) / config.p_safe_s
    return config.beta * view.kv_tokens[which] * view.occupancy - config.alpha * exposure


def order(view: StageView, urgency: np.ndarray, config: PolicyConfig) -> np.ndarray:
    """Waiting streams as Algorithm 1 has them: U0 by buffer, U1 by age, U2 by utility.

    Unknown streams stand among U1: by age, as SGLang has it. So do streams of U2 that waited for
    long; their utility may never be the highest. What nobody listens to stands behind U1, by age,
    and among it after a while.
    """
    waiting = view.waiting.nonzero()[0]
    if len(waiting) < 2:
        return waiting
    rank = np.abs(urgency[waiting]).astype(np.float64)  # UNKNOWN as U1
    key = view.arrived_s[waiting]
    unheard = ~view.managed[waiting]
    if np.count_nonzero(unheard):
        rank[unheard & ~overdue(view, waiting, config.max_wait_s)] = _BEHIND_U1
    if np.count_nonzero(rank != U1):
        rank[(rank == U2) & overdue(view, waiting, config.max_wait_s)] = U1
        key = np.where(rank == U0, view.buffered_s[waiting], key)
        key = np.where(rank == U2, -utility(view, waiting, config), key)
    return waiting[np.lexsort((key, rank))]


def in_turn(
    view: StageView, ordered: np.ndarray, urgency: np.ndarray, config: PolicyConfig
) -> np.ndarray:
    """ordered, without what nobody waits for while there is somebody in need."""
    if view.background is None or not np.count_nonzero(view.background[ordered]):
        return ordered
    put_off = view.background[ordered] & ~overdue(view, ordered, config.max_wait_s)
    in_need = urgency.view(np.uint8) <= U1  # UNKNOWN is 255 here
    running = in_need & view.managed & ~view.waiting
    if np.count_nonzero(running) or np.count_nonzero(in_need[ordered[~put_off]]):
        return ordered[~put_off]
    return ordered


def overdue(view: StageView, waiting: np.ndarray, limit_s: float) -> np.ndarray:
    return view.now_s - view.since_s[waiting] > limit_s
