"""Least squares with costs that are not negative."""

import numpy as np


def non_negative(square: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve the normal equations `square` x = `right` for x of at least 0.

    A cost that would be negative is taken to be zero, the most negative one first.

    Args:
        square: [n, n] float64, positive definite.
        right: [n] float64.
    Returns:
        [n] float64.
    """
    costs, free = np.zeros(len(right)), np.ones(len(right), bool)
    while free.any():
        costs[free] = np.linalg.solve(square[np.ix_(free, free)], right[free])
        costs[~free] = 0.0
        if (costs >= 0.0).all():
            break
        free[int(costs.argmin())] = False
    return np.maximum(costs, 0.0)
