"""Prometheus series of the stages, from their latest answers to pings."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sglang_live.stages.supervisor import Replica

_PREFIX = "sglang_live_stage_"


class StageCollector:
    """For a prometheus_client registry. replicas: called at each scrape."""

    def __init__(self, replicas: Callable[[], Iterable[Replica]]):
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        labels = ["stage", "replica"]
        up = GaugeMetricFamily(_PREFIX + "up", "1 while the replica serves.", labels=labels)
        starts = GaugeMetricFamily(_PREFIX + "starts", "Times it was started.", labels=labels)
        left = CounterMetricFamily(
            _PREFIX + "sessions_left",
            "Sessions that were placed elsewhere because the replica was down.",
            labels=labels,
        )
        load = GaugeMetricFamily(
            _PREFIX + "load", "What the replica says of itself.", labels=[*labels, "what"]
        )
        for replica in self._replicas():
            names = [replica.spec.stage, str(replica.spec.replica)]
            up.add_metric(names, float(replica.is_up))
            starts.add_metric(names, float(replica.n_starts))
            left.add_metric(names, float(replica.n_left))
            for what, value in (replica.ready.load if replica.ready else {}).items():
                load.add_metric([*names, what], value)
        yield from (up, starts, left, load)
