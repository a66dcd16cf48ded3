"""Prometheus series of the gateway.

Owner: one GatewayMetrics per process, on a given registry, so that tests have their own. All names
begin with sglang_live_gateway_; durations are in seconds.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "sglang_live_gateway_"
# Finer around half a second, the time of a good response.
_TTFP_BUCKETS_S = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
# An interruption should take effect within 0.2 s of the onset of speech.
_COMPARISON_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15)
_STOP_BUCKETS_S = (0.05, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7, 1.0, 2.0)


class GatewayMetrics:
    """Counts and measurements of the gateway.

    ttfp_from_decision_s: time from the decision that a turn has ended to the first sent audio.
    ttfp_from_speech_end_s: the same from the end of speech, in time of the user's audio.
    """

    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self._add_clients()
        self._add_turns()
        self._add_playback()
        self._add_frames()

    def _add_clients(self) -> None:
        """Sessions, connections and requests of clients."""
        self.sessions_open = self._gauge("sessions_open", "Open realtime sessions.")
        self.sessions = self._counter("sessions", "Realtime sessions opened.")
        self.loop_lag_s = self._gauge("loop_lag_seconds", "Mean delay of the event loop.")
        self.sessions_refused = self._counter(
            "sessions_refused", "Realtime connections refused, by error code.", "code"
        )
        self.clients_dropped = self._counter(
            "clients_dropped", "Connections ended by the server, by reason.", "reason"
        )
        self.sockets_lost = self._counter(
            "sockets_lost", "Sockets lost by resumable sessions, by what followed.", "outcome"
        )
        self.errors = self._counter("errors", "Error events sent, by code.", "code")
        self.proxied = self._counter(
            "proxied_requests",
            "Requests to SGLang's own API, by route and status.",
            "route",
            "status",
        )
        self.flex_running = self._gauge("flex_running", "Flex requests that run.")
        self.flex_waiting = self._gauge("flex_waiting", "Flex requests that wait for a place.")
        self.flex_requests = self._counter(
            "flex_requests", "Flex requests that got a place or none, by outcome.", "outcome"
        )
        self.timelines_lost = self._counter(
            "timelines_lost", "Timelines that could not be written."
        )

    def _add_turns(self) -> None:
        """Turns and responses."""
        self.responses_active = self._gauge("responses_active", "Responses being produced.")
        self.turns = self._counter(
            "turns", "Responses ended, by status and reason.", "status", "reason"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts of turns.")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Those of them whose KV existed."
        )
        self.transcripts = self._counter(
            "transcripts", "Transcripts of users' turns, by outcome.", "outcome"
        )
        self.endpoint_verdicts = self._counter(
            "endpoint_verdicts", "Pauses shown to the endpoint model, by verdict.", "verdict"
        )
        self.endpoint_verdict_s = self._histogram(
            "endpoint_verdict_seconds", "Time from a pause to its verdict.", _STOP_BUCKETS_S
        )
        self.echo_windows = self._counter(
            "echo_windows", "Windows of voice that were the agent's own sound."
        )
        self.echo_unknown_s = self._counter(
            "echo_unknown_seconds", "Audio sent too long before it plays to know its echo."
        )
        self.speculative_turns = self._counter(
            "speculative_turns",
            "Speculative turns, by outcome.",
            "outcome",
        )
        self.speculations_refused = self._counter(
            "speculations_refused",
            "Pauses in which no speculative turn began, by reason.",
            "reason",
        )
        self.vad_events = self._counter("vad_events", "Speech events, by kind.", "kind")
        self.turn_ends = self._counter("turn_ends", "Ends of spoken turns, by reason.", "reason")
        self.tool_calls = self._counter("tool_calls", "Functions called, by outcome.", "outcome")
        self.speech_truncated = self._counter(
            "speech_truncated",
            "Texts for /v1/audio/speech whose speech did not end within its bound.",
        )
        self.items_dropped = self._counter(
            "items_dropped",
            "Items that the server removed from conversations, by reason.",
            "reason",
        )
        self.prompts_unmeasured = self._counter(
            "prompts_unmeasured", "Long inputs accepted without a thinker's check of their length."
        )
        self.input_audio_dropped_s = self._counter(
            "input_audio_dropped_seconds", "Uncommitted audio without speech that was dropped."
        )
        self.ttfp_from_decision_s = self._histogram(
            "ttfp_from_decision_seconds",
            "Time from the decided end of a turn to the first sent audio.",
        )
        self.ttfp_from_speech_end_s = self._histogram(
            "ttfp_from_speech_end_seconds", "Time from the end of speech to the first sent audio."
        )
        self.turn_marks_s = Histogram(
            "sglang_live_turn_mark_seconds",
            "Start of the turn to the mark; see telemetry/trace.py.",
            ("mark",),
            registry=self.registry,
            buckets=_TTFP_BUCKETS_S,
        )

    def _add_frames(self) -> None:
        """Frame mode."""
        self.frames = self._counter(
            "frames", "Frames of users in frame mode, by outcome.", "outcome"
        )
        self.frames_missing = self._counter(
            "frames_missing", "Frame periods in which a user in frame mode sent nothing."
        )
        self.frame_latency_s = self._histogram(
            "frame_latency_seconds", "Time from a complete frame to its written tokens."
        )

    def _add_playback(self) -> None:
        """Playback of responses in the conversation."""
        self.barge_ins = self._counter("barge_ins", "Audible responses that the user interrupted.")
        self.false_alarms = self._counter(
            "false_alarms", "Speech that ended before it was an interruption."
        )
        self.voice_over_response = self._counter(
            "voice_over_response",
            "Voices while a response was audible, by what they were taken for, and why.",
            "decision",
            "reason",
        )
        self.pause_words = self._counter(
            "pause_words", "Words of turns up to a pause, by what they say of it.", "says"
        )
        self.voice_words = self._counter(
            "voice_words", "Words of short voices over a response, by outcome.", "outcome"
        )
        self.voice_comparisons = self._counter(
            "voice_comparisons", "Voices compared with the user's, by outcome.", "outcome"
        )
        self.voice_comparison_s = self._histogram(
            "voice_comparison_seconds", "Duration of one, with waiting.", _COMPARISON_BUCKETS_S
        )
        self.voices_learnt = self._counter(
            "voices_learnt", "Turns that the user's voice was learnt from, by outcome.", "outcome"
        )
        self.other_turns = self._counter(
            "other_turns", "Turns without a response because another person spoke."
        )
        self.stop_latency_s = self._histogram(
            "stop_latency_seconds",
            "Barge-in: onset of speech to the last sent audio.",
            _STOP_BUCKETS_S,
        )
        self.barge_in_latency_s = self._histogram(
            "barge_in_latency_seconds",
            "Barge-in: onset of speech to the end of the response.",
            _STOP_BUCKETS_S,
        )
        self.audio_sent_s = self._counter("audio_sent_seconds", "Audio accepted by the network.")
        self.audio_heard_s = self._counter("audio_heard_seconds", "Sent audio that was heard.")
        self.audio_unheard_s = self._counter(
            "audio_unheard_seconds", "Sent audio that was never heard."
        )
        self.audio_dropped_s = self._counter(
            "audio_dropped_seconds", "Audio discarded before it was sent."
        )
        self.audio_on_hold_s = self._counter(
            "audio_on_hold_seconds", "Time for which audio was held because of unconfirmed speech."
        )
        self.underruns = self._counter("underruns", "Times a user waited for more audio.")
        self.underrun_s = self._counter(
            "underrun_seconds", "Time that users waited for more audio."
        )
        self.acks = self._counter("playback_acks", "Acks of clients, by outcome.", "outcome")
        self.ack_timeouts = self._counter(
            "playback_ack_timeouts", "Times a client stopped sending acks while playing."
        )

        self.events_shortened = self._counter(
            "events_shortened", "Events too large for a data channel, by outcome.", "outcome"
        )

    def _gauge(self, name: str, doc: str) -> Gauge:
        return Gauge(_PREFIX + name, doc, registry=self.registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, doc, labels, registry=self.registry)

    def _histogram(
        self, name: str, doc: str, buckets: tuple[float, ...] = _TTFP_BUCKETS_S
    ) -> Histogram:
        return Histogram(_PREFIX + name, doc, registry=self.registry, buckets=buckets)
