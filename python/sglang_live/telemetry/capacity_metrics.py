"""Prometheus series of the server's capacity, computed at each scrape."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from sglang_live.capacity.control import Capacity

_PREFIX = "sglang_live_capacity_"


class CapacityCollector:
    """A collector for a prometheus_client registry."""

    def __init__(self, report: Callable[[], Capacity]):
        self._report = report

    def collect(self) -> Iterator[Metric]:
        now = self._report()
        yield _gauge("sessions", "Open sessions.", now.n_sessions)
        yield _gauge("session_limit", "Limit of open sessions.", now.limit)
        yield _gauge("sessions_more", "Sessions that may open now.", now.n_more)
        if now.share is not None:
            yield _gauge(
                "budget_share", "Share of its budget that the slowest tenth took.", now.share
            )
        used = GaugeMetricFamily(
            _PREFIX + "kv_share", "Used share of the KV pool.", labels=["stage"]
        )
        full = GaugeMetricFamily(
            _PREFIX + "kv_saturates_seconds", "Time until the pool is full.", labels=["stage"]
        )
        for stage, (share, saturates_s) in now.pools.items():
            used.add_metric([stage], share)
            full.add_metric([stage], saturates_s)
        yield from (used, full)


def _gauge(name: str, doc: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, doc, value=value)
