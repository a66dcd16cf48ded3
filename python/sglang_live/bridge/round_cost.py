"""Measured coefficients of an engine's RoundCost, and the error of its predictions.

In: each batch, with what it computed and the seconds that it took (bridge/rate_meter.py, which
excludes idle time). Out: the RoundCost of a RoundStamp. Owner: the RateMeter of rank 0.
"""

import math
from collections import deque

import numpy as np

from sglang_live.bridge.batch_work import BatchWork
from sglang_live.bridge.least_squares import non_negative
from sglang_live.policy.round_cost import UNMEASURED, RoundCost

# Fewer predictions tell nothing of their error.
_FEWEST = 16


class CostFit:
    """One line: seconds of a batch as a sum of costs times sizes.

    Least squares of relative errors, in which older batches count less and less. Where the batches
    do not determine a cost, it stays near its last value.
    """

    _KEPT = 128  # errors
    _FADING = 0.97  # weight of a batch beside the next one
    _INERTIA = 0.05  # weight of the last values beside one batch
    _EVERY = 4  # batches between two solutions
    # A batch that takes this many times its prediction is a fault of the machine, until it is
    # followed by as many more: then the engine has changed.
    _OUTLIER, _MOST_OUTLIERS = 4.0, 3

    def __init__(self, costs: tuple[float, ...], scale: tuple[float, ...]):
        """scale: smallest scale of each cost: one that was zero can be found again."""
        self.costs = np.array(costs)
        self._scale = np.array(scale)
        self._square = np.zeros((len(costs), len(costs)))
        self._right = np.zeros(len(costs))
        self._errors: deque[float] = deque(maxlen=self._KEPT)
        self._n_taken = self._n_outliers = 0
        self.error = math.inf

    def take(self, sizes: tuple[float, ...], spent_s: float) -> None:
        row = np.array(sizes)
        predicted_s = float(row @ self.costs)
        self._n_taken += 1
        self._errors.append(abs(spent_s - predicted_s) / max(predicted_s, 1e-6))
        if len(self._errors) >= _FEWEST and spent_s > self._OUTLIER * predicted_s:
            self._n_outliers += 1
            if self._n_outliers <= self._MOST_OUTLIERS:
                return
        else:
            self._n_outliers = 0
        row /= max(spent_s, predicted_s)
        self._square *= self._FADING
        self._square += row[:, None] * row
        self._right *= self._FADING
        self._right += row * (spent_s / max(spent_s, predicted_s))
        if self._n_taken % self._EVERY and self._n_taken > _FEWEST:
            return
        inertia = (self._INERTIA / np.maximum(self.costs, self._scale)) ** 2
        square = self._square + np.diag(inertia)
        self.costs = non_negative(square, self._right + inertia * self.costs)
        if len(self._errors) >= _FEWEST:
            self.error = sorted(self._errors)[int(0.9 * len(self._errors))]


class NoRoundCost:
    """Where nothing predicts the cost of rounds."""

    def take(self, work: BatchWork, spent_s: float) -> None: ...

    @property
    def cost(self) -> RoundCost:
        return UNMEASURED


class RoundCostMeter(NoRoundCost):
    def __init__(self) -> None:
        first = RoundCost()
        self._decode = CostFit(first.decode, (1e-3, 1e-4, 1e-7))
        self._prefill = CostFit(first.prefill, (1e-3, 1e-5, 1e-8, 1e-8, 1e-3, 1e-6))
        self._cost = first

    def take(self, work: BatchWork, spent_s: float) -> None:
        if work.n_streams:
            fit = self._decode
            fit.take((1.0, work.n_streams, work.n_context), spent_s)
        else:
            fit = self._prefill
            sizes = (work.n_tokens, work.n_context, work.n_squared, work.audio_s, work.n_loaded)
            fit.take((1.0, *sizes), spent_s)
        self._cost = RoundCost(
            decode=tuple(self._decode.costs.tolist()),
            prefill=tuple(self._prefill.costs.tolist()),
            decode_error=self._decode.error,
            prefill_error=self._prefill.error,
        )

    @property
    def cost(self) -> RoundCost:
        return self._cost
