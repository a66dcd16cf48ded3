"""How full a thinker's KV pool is during a run, and how many requests wait for it.

In: a simulated server, watched from its begin. Out: PoolUse of all runs of a point.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sglang_live.extensions.planner.simulation.server.server import Server

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Without KV of idle sessions, which can be evicted. Means are over the time of all runs.

    tokens_mean, tokens_most: that requests hold.
    waiting_mean: requests in the queue. waits_share: of the time, with at least one.
    turn_token_s: tokens of a turn, times how long it holds them.
    last_end_s: until the last response has been played, mean of the runs.
    tokens_over_time: mean of each span, of all runs.
    """

    tokens_mean: float
    tokens_most: int
    waiting_mean: float
    waits_share: float
    turn_token_s: float
    last_end_s: float
    tokens_over_time: tuple[int, ...]

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        return cls(**{**found, "tokens_over_time": tuple(found["tokens_over_time"])})


class PoolWatch:
    """Looks at the first thinker of one run. until_s: later than the run's end."""

    def __init__(self, until_s: float):
        self._until_s = until_s
        self._seen: list[tuple[int, int]] = []

    def begin(self, server: Server) -> None:
        engine = server.replicas.thinkers[0].engine

        def look() -> None:
            self._seen.append((engine.pool.total - engine.pool.free, len(engine.waiting)))

        for number in range(round(self._until_s / _LOOK_S)):
            server.events.at(number * _LOOK_S, look)

    def until(self, end_s: float) -> np.ndarray:
        """[n, 2]: tokens and waiting requests. Raises ValueError if the run ended later."""
        n = round(end_s / _LOOK_S)
        if n > len(self._seen):
            raise ValueError(f"the run ended after {end_s:.0f} s, the watch before")
        return np.array(self._seen[:n])


def pool_use(
    watches: Sequence[PoolWatch], ends_s: Sequence[float], n_turns: int, span_s: float
) -> PoolUse:
    """ends_s: of each run. n_turns: completed in all of them."""
    runs = [watch.until(end_s) for watch, end_s in zip(watches, ends_s, strict=True)]
    tokens, waiting = np.concatenate(runs).T
    per_span = round(span_s / _LOOK_S)
    n_spans = max(len(run) for run in runs) // per_span
    # A run that is over holds nothing.
    padded = [np.pad(run[:, 0], (0, max(0, n_spans * per_span - len(run)))) for run in runs]
    over_time = np.mean([one[: n_spans * per_span] for one in padded], axis=0)
    spans = over_time.reshape(n_spans, per_span).mean(axis=1)
    return PoolUse(
        tokens_mean=round(float(tokens.mean()), 1),
        tokens_most=int(tokens.max()),
        waiting_mean=round(float(waiting.mean()), 3),
        waits_share=round(float((waiting > 0).mean()), 4),
        turn_token_s=round(float(tokens.sum()) * _LOOK_S / n_turns, 1),
        last_end_s=round(float(np.mean(ends_s)), 1),
        tokens_over_time=tuple(round(one) for one in spans.tolist()),
    )
