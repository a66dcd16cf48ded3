"""What the policies of an engine have done so far, for a stage's load."""

from sglang_live.bridge.feed_types import PolicyEvents, PolicyReport


class PolicyTotals:
    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._n_events = 0

    def take(self, report: PolicyReport | PolicyEvents) -> None:
        if isinstance(report, PolicyReport):
            self._totals = report.totals
        else:
            self._n_events += len(report.rids)

    def load(self) -> dict[str, float]:
        """Empty as long as no policy has reported."""
        own = {"events": float(self._n_events)} if self._n_events else {}
        return {f"policy_{name}": value for name, value in (self._totals | own).items()}
