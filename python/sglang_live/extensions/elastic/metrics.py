"""Prometheus series of the mover of KV memory, read when they are collected."""

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily


class KvMoverCollector:
    """A collector for a prometheus_client registry."""

    def __init__(self, report: Callable[[], dict[str, float]]):
        self._report = report

    def collect(self) -> Iterator[Metric]:
        series = GaugeMetricFamily(
            "sglang_live_kv_mover", "Moves of KV memory between engines.", labels=["what"]
        )
        for name, value in self._report().items():
            series.add_metric([name], value)
        yield series
