"""How late an engine's decode rounds are: the time for which streams wait for their next step.

Whatever delays a round counts: prefills, another stage's turn on a shared device, a host that
pauses. In: the wait of each round, longest of its streams, less the time of a round. Out: a high
quantile over the latest minutes, for the marks of pacing. Owner: one Lateness per Rounds; equal on
all ranks, because the waits are.
"""

import numpy as np

from sglang_live.policy.view import UNMEASURED_LATE_S

_KEPT, _LEAST, _EVERY = 4096, 128, 64
_QUANTILE = 0.99
# A longer wait is a fault of the machine, or a stream that could not step.
_LONGEST_S = 2.0


class Lateness:
    """
    Attributes:
        p99_s: lateness that one round in a hundred exceeds.
    """

    def __init__(self) -> None:
        self.p99_s = UNMEASURED_LATE_S
        self._rounds = np.zeros(_KEPT)
        self._n = 0

    def take(self, late_s: float) -> None:
        """Count one round."""
        if late_s > _LONGEST_S:
            return
        self._rounds[self._n % _KEPT] = max(late_s, 0.0)
        self._n += 1
        if self._n >= _LEAST and self._n % _EVERY == 0:
            kept = self._rounds[: min(self._n, _KEPT)]
            at = int(_QUANTILE * len(kept))
            self.p99_s = float(np.partition(kept, at)[at])
