"""Replies of drawn lengths, so that arms are compared on the same work.

The demo model ends its replies by chance, and a run is as long as its longest caller. Here the
thinker never ends by itself, the talker ends with the text, and callers ask for so many tokens:
a frame of 80 ms each.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_live.policy.view import FRAME_S

# Logits of ends that never come, and that come as soon as they may.
_NEVER, _AT_ONCE = -30.0, 30.0


@dataclass(frozen=True, slots=True)
class ReplyLengths:
    """durations_s: measured replies, from which lengths are drawn."""

    durations_s: np.ndarray

    def draw_tokens(self, rng: np.random.Generator) -> int:
        return max(1, round(float(rng.choice(self.durations_s)) / FRAME_S))


def obedient_model() -> Path:
    """The demo model's directory in which replies are as long as asked; built when absent."""
    from sglang_live.models.demo.build import ensure_built
    from sglang_live.models.demo.location import DemoSize

    return ensure_built(DemoSize(thinker_end_logit=_NEVER, talker_end_logit=_AT_ONCE))
