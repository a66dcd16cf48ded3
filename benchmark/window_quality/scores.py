"""Perplexities and shares of right answers, with intervals. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
# Neighbouring tokens are not independent, so whole blocks of a text are drawn again.
BLOCK_TOKENS = 128

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval by the bootstrap."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws: Floats) -> Self:
        low, high = np.percentile(draws, (2.5, 97.5))
        return cls(float(value), float(low), float(high))


def perplexity(nll: Floats, seed: int) -> Estimate:
    """nll: [n_texts, n_scored] natural logarithms."""
    return _exp_of_mean(_blocks(nll), seed)


def perplexity_ratio(nll: Floats, reference: Floats, seed: int) -> Estimate:
    """Of the same tokens in two arms: above 1, `nll` predicts worse."""
    return _exp_of_mean(_blocks(nll - reference), seed)


def share(right: Sequence[bool], groups: Sequence[int], seed: int) -> Estimate:
    """groups: of each answer its dialogue; dialogues are drawn again as a whole."""
    rows, of = np.asarray(right, dtype=float), np.asarray(groups)
    means = np.array([rows[of == group].mean() for group in np.unique(of)])
    drawn = _again(len(means), seed)
    return Estimate.of(rows.mean(), means[drawn].mean(axis=1))


def _blocks(values: Floats) -> Floats:
    """Returns [n_blocks] means; a rest shorter than a block is left out."""
    n = max(values.shape[1] // BLOCK_TOKENS, 1)
    width = values.shape[1] // n
    means: Floats = values[:, : n * width].reshape(-1, width).mean(axis=1)
    return means


def _exp_of_mean(means: Floats, seed: int) -> Estimate:
    drawn = _again(len(means), seed)
    return Estimate.of(np.exp(means.mean()), np.exp(means[drawn].mean(axis=1)))


def _again(n: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, n, (DRAWS, n))
