"""Responses of drawn lengths, so that arms are compared on the same work."""

from dataclasses import dataclass

import numpy as np

from sglang_live.policy.view import FRAME_S


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """durations_s: responses, measured or chosen, from which lengths are drawn."""

    durations_s: np.ndarray

    def draw_tokens(self, rng: np.random.Generator) -> int:
        return max(1, round(float(rng.choice(self.durations_s)) / FRAME_S))
