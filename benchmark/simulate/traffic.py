"""Arrivals of sessions through a day, as those of real services.

The day's shape is one service's rates by ten minutes; within it arrivals come in the bursts of
another service's trace, in pieces of 10 s, run faster or slower (time rescaling).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from sglang_live.extensions.planner.simulation.load.arrivals import trace_arrivals

DAY_S, _WINDOW_S = 86_400, 600
TRAFFIC = Path(__file__).parent.parent / "workloads" / "traffic.json"


@dataclass(frozen=True, slots=True)
class Traffic:
    """
    second_counts: arrivals of each second of a trace.
    window_rates: of ten minutes each, on any scale.
    """

    second_counts: np.ndarray
    window_rates: np.ndarray

    @classmethod
    def load(cls, path: Path = TRAFFIC) -> Self:
        found = json.loads(path.read_text("utf-8"))
        rates = np.array(found["window_rates_rps"], float)
        known = np.flatnonzero(rates)
        # Windows without a record get a rate between those before and behind.
        rates = np.interp(np.arange(len(rates)), known, rates[known])
        return cls(np.array(found["second_counts"]), rates)

    @property
    def busiest(self) -> float:
        """Rate of the busiest ten minutes over the day's mean."""
        return float(self.window_rates.max() / self.window_rates.mean())

    def arrivals_s(self, per_day: float, seed: int) -> np.ndarray:
        """Times of a day's arrivals, per_day of them on average."""
        rng = np.random.default_rng(seed)
        edges_s = np.arange(len(self.window_rates) + 1) * _WINDOW_S
        cumulative = np.concatenate([[0.0], np.cumsum(self.window_rates)])
        cumulative *= per_day / cumulative[-1]
        times = trace_arrivals(self.second_counts, cumulative[-1], rng)
        return np.interp(times, cumulative, edges_s)

    def bursts_s(self, per_s: float, duration_s: float, seed: int) -> np.ndarray:
        """Times of arrivals within duration_s, per_s of them on average, at any time of day."""
        rng = np.random.default_rng(seed)
        return trace_arrivals(self.second_counts, per_s * duration_s, rng) / per_s
