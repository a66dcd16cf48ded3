"""Which streams are retracted first where memory is short: LiveServe's order, from its end.

Algorithm 1 (arXiv 2606.22983) serves U0 before U1 before U2, and U2 by falling utility. In the
utility, KV is a reason to serve a stream: its end frees what it holds (equation 3: a long resident
request is favoured in a crowded stage; figure 8: one that is delayed instead keeps its KV
allocated). So a stream with much KV is kept, which would also take longest to compute again, and
one with little KV and much unheard speech goes first.
"""

import numpy as np

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.pacing import pacing_marks
from sglang_live.policy.urgency import utility
from sglang_live.policy.view import U0, U2, Classes, Ints, StageView


def retraction_order(view: StageView, urgency: Classes, config: PolicyConfig) -> tuple[Ints, Ints]:
    """The streams that hold KV, in the order in which they are retracted.

    Returns:
        Those of U2, by rising utility; then the others: first the blocked ones, which cannot use
        their KV now; of the rest U1 and unknown ones, the latest first, and U0, the one with the
        largest buffer first.
    """
    held = (~view.waiting & (view.kv_tokens > 0)).nonzero()[0]
    has_time = urgency[held] == U2
    spare, others = held[has_time], held[~has_time]
    spare = spare[np.argsort(utility(view, spare, config), kind="stable")]
    dry = urgency[others] == U0
    key = np.where(dry, -view.buffered_s[others], -view.arrived_s[others])
    runs = np.ones(len(others), bool) if view.blocked is None else ~view.blocked[others]
    return spare, others[np.lexsort((key, dry, runs))]


def spare(view: StageView, urgency: Classes, safe_s: float, config: PolicyConfig) -> Ints:
    """The streams that are retracted so that an urgent stream can be admitted, in this order.

    All of them have listeners. A running one is spare only if its utility is negative, so that the
    speech it may waste outweighs its KV, and if its buffer is above the low mark, so that it has
    time to come back.
    """
    found = retraction_order(view, urgency, config)[0]
    found = found[view.managed[found]]
    low_s = pacing_marks(view, safe_s, config).low_s
    is_far = (utility(view, found, config) < 0.0) & (view.buffered_s[found] > low_s)
    return found[view.paused[found] | is_far]
