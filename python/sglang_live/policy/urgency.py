"""Urgency classes of streams, the order in which they are served, and that of retraction.

LiveServe (arXiv 2606.22983) section 4: U0 may fall silent, U1 has not sounded yet, U2 has time.
"""

from dataclasses import dataclass

import numpy as np

from sglang_live.policy.admission import overdue
from sglang_live.policy.view import U0, U1, U2, Classes, Floats, Ints, StageView
from sglang_live.settings import NonNegative, Positive, Settings

UNKNOWN = -1
_BEHIND_U1 = U1 + 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgencyConfig(Settings):
    """LiveServe eqs. 1 to 3.

    p_safe_s: P_safe. Three frames of an unfinished chunk and pipeline_s are not audio yet, so a
        stream with a buffer below about this is about to fall silent.
    beta: weight of one KV token in a full pool, beside that of one P_safe of speech that a barge-in
        would waste: LiveServe's beta over alpha. 2000 tokens have the weight of ten P_safe.
    """

    p_safe_s: Positive = 0.5
    beta: NonNegative = 0.005


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


def utility(view: StageView, which: Ints, config: UrgencyConfig) -> Floats:
    """Returns the utility of streams of U2: KV they will free, minus speech they may waste.

    Without a listener there is no speech to waste.
    """
    exposure = np.maximum(0.0, view.buffered_s[which] - config.p_safe_s) / config.p_safe_s
    exposure = np.where(view.managed[which], exposure, 0.0)
    return config.beta * view.kv_tokens[which] * view.occupancy - exposure


def worth_s(view: StageView, config: UrgencyConfig) -> Floats:
    """Returns [n], the buffer at which the utility of each stream is zero."""
    exposure = config.beta * view.occupancy * view.kv_tokens
    return np.asarray(config.p_safe_s * (1.0 + exposure), np.float64)


def order(view: StageView, urgency: Classes, config: UrgencyConfig, max_wait_s: float) -> Ints:
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
        rank[unmanaged & ~overdue(view, waiting, max_wait_s)] = _BEHIND_U1
    if np.count_nonzero(rank != U1):
        rank[(rank == U2) & overdue(view, waiting, max_wait_s)] = U1
        key = np.where(rank == U0, view.buffered_s[waiting], key)
        key = np.where(rank == U2, -utility(view, waiting, config), key)
    return waiting[np.lexsort((key, rank))]


def retraction_order(view: StageView, classes: Classes, config: UrgencyConfig) -> tuple[Ints, Ints]:
    """The streams that hold KV, in the order in which they are retracted: that of serving, from
    its end.

    In the utility, KV is a reason to serve a stream: its end frees what it holds (LiveServe,
    equation 3: a long resident request is favoured in a crowded stage; figure 8: one that is
    delayed instead keeps its KV allocated). So a stream with much KV is kept, which would also take
    longest to compute again, and one with little KV and much unheard speech goes first.

    Returns:
        Those of U2, by rising utility; then the others: first the blocked ones, which cannot use
        their KV now; of the rest U1 and unknown ones, the latest first, and U0, the one with the
        largest buffer first.
    """
    held = (~view.waiting & (view.kv_tokens > 0)).nonzero()[0]
    has_time = classes[held] == U2
    spare, others = held[has_time], held[~has_time]
    spare = spare[np.argsort(utility(view, spare, config), kind="stable")]
    dry = classes[others] == U0
    key = np.where(dry, -view.buffered_s[others], -view.arrived_s[others])
    runs = np.ones(len(others), bool) if view.blocked is None else ~view.blocked[others]
    return spare, others[np.lexsort((key, dry, runs))]


def spare(view: StageView, classes: Classes, low_s: float, config: UrgencyConfig) -> Ints:
    """The streams that are retracted so that an urgent stream can be admitted, in this order.

    All of them have listeners. A running one is spare only if its utility is negative, so that the
    speech it may waste outweighs its KV, and if its buffer is above the low mark, so that it has
    time to come back.

    Args:
        low_s: the low mark of pacing.
    """
    found = retraction_order(view, classes, config)[0]
    found = found[view.managed[found]]
    is_far = (utility(view, found, config) < 0.0) & (view.buffered_s[found] > low_s)
    return found[view.paused[found] | is_far]
