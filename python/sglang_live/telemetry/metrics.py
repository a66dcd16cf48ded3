"""Prometheus series of the gateway.

Owner: one GatewayMetrics per process, on the registry it is given, so that tests have their own.
All names begin with sglang_live_gateway_; durations are in seconds.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "sglang_live_gateway_"
# Finer around the half second that a good answer takes.
_TTFP_BUCKETS_S = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


class GatewayMetrics:
    """What the gateway counts and measures.

    ttfp_from_decision_s: from the decision that the turn has ended to the first audio sent.
    ttfp_from_speech_end_s: the same from the last voiced sound, on the caller's audio clock.
    """

    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self.sessions_open = self._gauge("sessions_open", "Open realtime sessions.")
        self.responses_active = self._gauge("responses_active", "Responses being produced.")
        self.sessions = self._counter("sessions", "Realtime sessions opened.")
        self.sessions_refused = self._counter(
            "sessions_refused", "Realtime connections refused, by error code.", "code"
        )
        self.turns = self._counter(
            "turns", "Responses ended, by status and reason.", "status", "reason"
        )
        self.errors = self._counter("errors", "Error events sent, by code.", "code")
        self.clients_dropped = self._counter(
            "clients_dropped", "Connections ended by the server, by reason.", "reason"
        )
        self.vad_events = self._counter("vad_events", "Speech events, by kind.", "kind")
        self.items_dropped = self._counter(
            "items_dropped", "Items dropped from full conversations."
        )
        self.input_audio_dropped_s = self._counter(
            "input_audio_dropped_seconds", "Uncommitted audio without speech that was dropped."
        )
        self.proxied = self._counter(
            "proxied_requests",
            "Requests to SGLang's own API, by route and status.",
            "route",
            "status",
        )
        self.ttfp_from_decision_s = self._histogram(
            "ttfp_from_decision_seconds", "End of turn decided to first audio sent."
        )
        self.ttfp_from_speech_end_s = self._histogram(
            "ttfp_from_speech_end_seconds", "End of speech to first audio sent."
        )

        self.turn_marks_s = Histogram(
            "sglang_live_turn_mark_seconds",
            "Turn begun to mark reached; see telemetry/trace.py.",
            ("mark",),
            registry=registry,
            buckets=_TTFP_BUCKETS_S,
        )

    def _gauge(self, name: str, doc: str) -> Gauge:
        return Gauge(_PREFIX + name, doc, registry=self.registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, doc, labels, registry=self.registry)

    def _histogram(self, name: str, doc: str) -> Histogram:
        return Histogram(_PREFIX + name, doc, registry=self.registry, buckets=_TTFP_BUCKETS_S)
