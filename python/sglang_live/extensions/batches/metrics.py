"""Prometheus series of the Batch API. Names begin with sglang_live_batch_."""

from prometheus_client import CollectorRegistry, Counter, Gauge

_PREFIX = "sglang_live_batch_"


class BatchMetrics:
    def __init__(self, registry: CollectorRegistry):
        def gauge(name: str, doc: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, doc, labels, registry=registry)

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, doc, labels, registry=registry)

        self.lines = counter("lines", "Lines of batches with a result, by outcome.", "outcome")
        self.running = gauge("lines_running", "Lines of batches that run.")
        self.at_once = gauge("lines_at_once", "Lines of batches that may run now.")
        self.waiting = gauge("lines_waiting", "Lines of valid batches that wait.")
        self.open = gauge("open", "Batches that have not ended, by status.", "status")
        self.batches = counter("ended", "Batches that ended, by status.", "status")
        self.retries = counter("line_retries", "Further tries of lines, by error code.", "code")
        self.paused = gauge(
            "paused", "Whether lines do not start: the disk; number of full keys.", "reason"
        )
