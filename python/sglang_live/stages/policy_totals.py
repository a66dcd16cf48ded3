"""Totals of what an engine's policies have done, for the stage's load."""

from sglang_live.engine_channel.messages import PolicyReport


class PolicyTotals:
    def __init__(self) -> None:
        self._totals: dict[str, float] = {}

    def take(self, report: PolicyReport) -> None:
        self._totals = report.totals

    def load(self) -> dict[str, float]:
        """Gauges; empty until the policies have reported."""
        return {f"policy_{name}": value for name, value in self._totals.items()}
