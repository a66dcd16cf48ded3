"""A modelled device: work of all stages that share it, first come, first served.

As bridge/modelled/clock.py, whose time is real: work begins when it is launched, or when the work
before it has ended. What it costs is in sglang_live.device_model.
"""

from collections import Counter, defaultdict


class Device:
    """
    Attributes:
        busy_s: duration of all work, by stage.
        n_batches: number of pieces of work, by stage.
    """

    def __init__(self) -> None:
        self._free_s = 0.0
        self.busy_s: dict[str, float] = defaultdict(float)
        self.n_batches: Counter[str] = Counter()

    def book(
        self, stage: str, cost_s: float, launched_s: float, not_before_s: float = 0.0
    ) -> float:
        """Append work. Returns the time at which it ends, not_before_s at the earliest."""
        self._free_s = max(max(launched_s, self._free_s) + cost_s, not_before_s)
        self.busy_s[stage] += cost_s
        self.n_batches[stage] += 1
        return self._free_s
