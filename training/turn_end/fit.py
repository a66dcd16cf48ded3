"""Fits of TurnEndWeights, and what they are worth. Pure: no audio, no models, no files.

The logistic model is fitted by weighted maximum likelihood with a small ridge, the lengths of
pauses by a log-normal distribution that is cut at PAUSE_MS.
"""

import math
from collections.abc import Sequence

import numpy as np

from sglang_live.interaction.turn_end import PAUSE_MS, TurnEndWeights, score_evidence
from training.turn_end.pauses import JudgedPause

# The silence that ends a turn of this eagerness on a server without the endpoint model. With it the
# turn ends within its pauses as often, but sooner.
SILENCE_MS = {"low": 1200, "medium": 700, "high": 400}
_RIDGE = 0.5
# From the silence to the decision that it ends the turn: the verdict on it comes later.
_FIRST_VERDICT_MS = PAUSE_MS + 50


def fitted(pauses: Sequence[JudgedPause], cutoff_ms: dict[str, float]) -> TurnEndWeights:
    is_end, weight = _is_end(pauses), _weight(pauses)
    columns = np.array([(1.0, score_evidence(pause.score)) for pause in pauses])
    bias, score = logistic(columns, is_end, weight)
    within = [pause for pause in pauses if not pause.is_end]
    mean, sd = log_normal([p.lasts_ms for p in within], _weight(within))
    return TurnEndWeights(
        bias=bias,
        score=score,
        pause_log_mean=mean,
        pause_log_sd=sd,
        cutoff_ms=cutoff_ms,
    )


def logistic(columns: np.ndarray, is_end: np.ndarray, weight: np.ndarray) -> list[float]:
    """Weights of the columns, the first of which is 1 and has no ridge. By Newton's method."""
    ridge = np.diag([1e-6] + [_RIDGE] * (columns.shape[1] - 1))
    found = np.zeros(columns.shape[1])
    for _ in range(100):
        probability = 1 / (1 + np.exp(-columns @ found))
        slope = columns.T @ (weight * (is_end - probability)) - ridge @ found
        bend = weight * probability * (1 - probability)
        step = np.linalg.solve((columns.T * bend) @ columns + ridge, slope)
        found += step
        if np.abs(step).max() < 1e-9:
            break
    return [float(each) for each in found]


def log_normal(lengths_ms: Sequence[float], weight: np.ndarray) -> tuple[float, float]:
    """Mean and deviation of the logarithm of a length, of which only those above PAUSE_MS are seen.

    On a grid, because the likelihood is flat along a ridge.
    """
    logs = np.log(np.maximum(lengths_ms, PAUSE_MS))
    total, first = weight.sum(), float(weight @ logs)
    second = float(weight @ logs**2)
    best = (-math.inf, 0.0, 0.0)
    for mean in np.arange(4.5, 7.5, 0.02):
        for sd in np.arange(0.4, 1.8, 0.02):
            squares = (second - 2 * mean * first + total * mean**2) / (2 * sd**2)
            tail = math.erfc((math.log(PAUSE_MS) - mean) / (sd * math.sqrt(2))) / 2
            likelihood = -squares - total * (math.log(sd) + math.log(tail))
            best = max(best, (likelihood, float(mean), float(sd)))
    return round(best[1], 2), round(best[2], 2)


def held_back(pauses: Sequence[JudgedPause]) -> list[tuple[JudgedPause, TurnEndWeights]]:
    """Each pause with the weights fitted to all other groups."""
    found = []
    for group in sorted({pause.group for pause in pauses}):
        weights = fitted([pause for pause in pauses if pause.group != group], {})
        found += [(pause, weights) for pause in pauses if pause.group == group]
    return found


def cutoff_costs(judged: Sequence[tuple[JudgedPause, TurnEndWeights]]) -> dict[str, float]:
    """By eagerness, the cost at which as many pauses end turns as with its silence."""
    found = {}
    for eagerness, silence_ms in SILENCE_MS.items():
        share = figures([(pause, silence_ms) for pause, _ in judged])["false_cutoffs"]
        costs = np.geomspace(100, 30_000, 200)
        shares = [figures(waits(judged, cost))["false_cutoffs"] for cost in costs]
        found[eagerness] = round(float(costs[np.argmin(np.abs(np.array(shares) - share))]))
    return {**found, "auto": found["medium"]}


def waits(
    judged: Sequence[tuple[JudgedPause, TurnEndWeights]], cutoff_ms: float
) -> list[tuple[JudgedPause, float]]:
    return [(p, w.wait_ms(w.log_odds(p.score), cutoff_ms)) for p, w in judged]


def figures(waited: Sequence[tuple[JudgedPause, float]]) -> dict[str, float]:
    """Share of pauses that end the turn, and delays of its ends, which every silence reaches."""
    ends_ms = np.array([max(w, _FIRST_VERDICT_MS) for p, w in waited if p.is_end])
    end_weight = _weight([p for p, _ in waited if p.is_end])
    within = [(p, w) for p, w in waited if not p.is_end]
    cut = np.array([p.lasts_ms > max(w, _FIRST_VERDICT_MS) for p, w in within])
    order = np.argsort(ends_ms)
    up_to = np.cumsum(end_weight[order]) / end_weight.sum()
    p50, p90 = (float(ends_ms[order][np.searchsorted(up_to, q - 1e-9)]) for q in (0.5, 0.9))
    return {
        "false_cutoffs": float(np.average(cut, weights=_weight([p for p, _ in within]))),
        "delay_p50_ms": round(p50),
        "delay_p90_ms": round(p90),
        "delay_mean_ms": round(float(np.average(ends_ms, weights=end_weight))),
    }


def _is_end(pauses: Sequence[JudgedPause]) -> np.ndarray:
    return np.array([float(pause.is_end) for pause in pauses])


def _weight(pauses: Sequence[JudgedPause]) -> np.ndarray:
    return np.array([pause.weight for pause in pauses])
