"""How soon a decode round may follow the one before it, where stages share a device.

A decode round costs nearly the same for one stream as for ten, and it delays whatever another stage
launches behind it: a prompt, a chunk of audio. An engine that decodes as fast as it can therefore
makes many small rounds, and keeps a round of its own in front of the others' work. With an interval
between the rounds each has more streams, and the device is free in between.
"""

import numpy as np

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.view import Bools, StageView


def decode_interval_s(
    view: StageView, has_kv: Bools, config: PolicyConfig, *, crowded: bool
) -> float:
    """Returns the least time from a decode round to the next one; 0: there is none.

    Only streams that are heard have one: for the others more tokens per second are better, and
    there is no time in which theirs are needed.

    Args:
        has_kv: bool [n], streams that could step.
        crowded: others wait for the memory that these hold. Unless a later stage needs the device,
            they are then computed as fast as it can, so that they end.
    """
    if not config.interval_steps or (crowded and not view.peer_urgent):
        return 0.0
    # Free indices have no KV.
    decodes = has_kv & (view.kv_tokens > 0)
    unheard = decodes & ~(view.managed & ~np.isnan(view.buffered_s))
    return 0.0 if np.count_nonzero(unheard) else config.interval_steps * config.step_s
