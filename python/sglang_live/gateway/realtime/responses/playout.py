"""The responses that the user may still be hearing.

In: audio that the network took, acks, truncations, interruptions. Out: assistant items truncated
to what was heard, audio held, released and discarded, conversation.item.truncated.
Owner: one Playout per connection. For the protocol a response is over when it is done, for the
user when its audio has been played.
"""

from sglang_live.gateway.realtime.conversation.conversation import Conversation
from sglang_live.gateway.realtime.outbox import Outbox
from sglang_live.gateway.realtime.responses.writer import ActiveResponse
from sglang_live.gateway.realtime.turns.echo_filter import EchoFilter
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.telemetry.metrics import GatewayMetrics


class Playout:
    def __init__(
        self,
        outbox: Outbox,
        conversation: Conversation,
        monitor: SessionMonitor,
        metrics: GatewayMetrics,
        echo: EchoFilter,
    ):
        self._outbox = outbox
        self._conversation = conversation
        self._monitor = monitor
        self._metrics = metrics
        self.echo = echo
        self._responses: list[ActiveResponse] = []  # of the conversation, oldest first
        self._held: list[str] = []

    @property
    def audible(self) -> bool:
        """Whether some response was sent in part and not heard to its end."""
        return any(self._monitor.audible(response.playback) for response in self._responses)

    @property
    def buffered_s(self) -> float:
        """Seconds of audio that the client has, and the user has still to hear."""
        return sum(self._monitor.unheard_s(response.playback) for response in self._responses)

    @property
    def whole(self) -> bool:
        """Whether all audio of all responses was sent."""
        return all(
            response.playback.clock.finished
            for response in self._responses
            if self._monitor.audible(response.playback)
        )

    def add(self, response: ActiveResponse) -> None:
        self._responses = [older for older in self._responses if not older.playback.retired]
        self._responses.append(response)

    def audio_sent(self, response: ActiveResponse, frame: bytes, duration_s: float) -> None:
        """The network took this frame of its audio."""
        self.echo.audio_sent(frame, response.plan.config.output_format)
        self._monitor.audio_sent(response.playback, duration_s)
        self.check_all_sent(response)

    def check_all_sent(self, response: ActiveResponse) -> None:
        """To be called when a response is done, too: its last audio may have been sent before."""
        # Playback of a cancelled response is stopped instead.
        if response.writer.all_audio_sent and response.writer.status != "cancelled":
            self._monitor.all_audio_sent(response.playback)

    def hold(self) -> None:
        """Keep the audio of all responses in the gateway until release()."""
        for response in self._responses:
            if response.id not in self._held:
                self._held.append(response.id)
                self._outbox.hold(response.id)

    def release(self) -> None:
        for response_id in self._held:
            self._outbox.release(response_id)
        self._held = []

    def discard(self, response_id: str) -> None:
        """Drop audio of a response that was not sent."""
        self._metrics.audio_dropped_s.inc(self._outbox.discard_audio(response_id))
        self._outbox.release(response_id)

    def interrupt(self) -> None:
        """The user speaks: playback of every response ends here."""
        self.echo.playback_stopped()
        for response in self._responses:
            if not self._monitor.over(response.playback):
                self.discard(response.id)
                heard_s = self._monitor.stopped(response.playback, barge_in=True)
                self._truncate(response, heard_s, emit=True)

    def cancel(self, response: ActiveResponse) -> None:
        """The client ended it. Without acks, the audio that was sent counts as heard until the
        client truncates the item."""
        self.echo.playback_stopped()
        by_acks = response.playback.clock.by_acks
        heard_s = self._monitor.stopped(response.playback, barge_in=False)
        if by_acks:
            self._truncate(response, heard_s, emit=True)

    def ack(self, item_id: str, audio_end_ms: float) -> None:
        """The client reports how far it has played.

        Raises:
            ClientEventError: there is no such item.
        """
        response = self._find(item_id)
        if response is None:
            self._conversation.get(item_id, action="ack")
            self._metrics.acks.labels("stale").inc()
            return
        heard_s = self._monitor.acked(response.playback, audio_end_ms / 1000)
        if response.playback.clock.stopped:
            self._truncate(response, heard_s, emit=False)

    def truncated(self, item_id: str, audio_end_ms: float) -> None:
        """The client truncated an item, so playback stopped there if it is still followed."""
        response = self._find(item_id)
        if response:
            self._monitor.truncated(response.playback, audio_end_ms / 1000)

    def _truncate(self, response: ActiveResponse, heard_s: float, *, emit: bool) -> None:
        item = response.item
        if item is None or item.modality != "audio" or not item.end_playback(heard_s * 1000):
            return
        if emit and not item.has_left:
            assert item.heard_ms is not None
            self._outbox.emit(
                "conversation.item.truncated",
                item_id=item.id,
                content_index=0,
                audio_end_ms=int(item.heard_ms),
            )

    def _find(self, item_id: str) -> ActiveResponse | None:
        return next((r for r in self._responses if r.item and r.item.id == item_id), None)
