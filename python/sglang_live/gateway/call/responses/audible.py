"""The responses that the user may still be hearing.

In: audio that the network took, acks, truncations, interruptions. Out: assistant items truncated
to what was heard, audio held, released and discarded.
Owner: one AudibleResponses per connection. For the protocol a response is over when it is done, for
the user when its audio has been played.
"""

from collections.abc import Mapping

import numpy as np

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.gateway.audio.codec import PCM, WireDecoder, WireFormat
from sglang_live.gateway.audio.resampler import StreamResampler
from sglang_live.gateway.call.conversation.conversation import Conversation
from sglang_live.gateway.call.ports import ItemPort, Lanes
from sglang_live.gateway.call.responses.writer import ActiveResponse
from sglang_live.interaction.filters.echo import RATE_HZ, EchoFilter
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.playback import PlaybackClock
from sglang_live.telemetry.metrics import GatewayMetrics

# In the last moments of a complete response a short "yes" is an answer.
_ENDING_S = 1.0


class AudibleResponses:
    def __init__(
        self,
        lanes: Lanes,
        port: ItemPort,
        conversation: Conversation,
        monitor: SessionMonitor,
        metrics: GatewayMetrics,
        echo: EchoFilter,
    ):
        """echo: is told what is played."""
        self._lanes = lanes
        self._port = port
        self._conversation = conversation
        self._monitor = monitor
        self._metrics = metrics
        self._echo = echo
        self._decoder = _Decoder(PCM)
        self._responses: list[ActiveResponse] = []  # of the conversation, oldest first
        self._held: list[str] = []

    @property
    def any(self) -> bool:
        """Whether some response was sent in part and not heard to its end."""
        return any(self._monitor.audible(response.playback) for response in self._responses)

    @property
    def buffered_s(self) -> float:
        """Seconds of audio that the client has, and the user has still to hear."""
        return sum(self._monitor.unheard_s(response.playback) for response in self._responses)

    def is_ending(self) -> bool:
        """Whether these are the last moments of all responses."""
        audible = [r for r in self._responses if self._monitor.audible(r.playback)]
        left_s = sum(response.unheard_s(self._monitor.now_s) for response in audible)
        return all(response.writer.done for response in audible) and left_s <= _ENDING_S

    def add(self, response: ActiveResponse) -> None:
        self._responses = [older for older in self._responses if not older.playback.retired]
        self._responses.append(response)

    def audio_sent(self, response: ActiveResponse, frame: bytes, duration_s: float) -> None:
        """The network took this frame of its audio."""
        self._plays(response, frame)
        self._monitor.audio_sent(response.playback, duration_s)
        self.check_all_sent(response)

    def client_left(self) -> None:
        """Its socket is lost: nothing is played until client_returned()."""
        self._echo.playback_stopped()
        self._monitor.client_left()

    def client_returned(self, heard_s: Mapping[str, float]) -> None:
        """heard_s: by response, what the client has heard; of others, what was heard before."""
        self._monitor.client_returned(heard_s)

    def clock_of(self, response_id: str) -> PlaybackClock | None:
        """None: nothing of it can be heard any more."""
        clocks = [one.playback.clock for one in self._responses if one.id == response_id]
        return next((clock for clock in clocks if not clock.stopped), None)

    def sent_again(self, response_id: str, frame: bytes) -> None:
        """The network took audio for a client that had not heard it."""
        for response in self._responses:
            if response.id == response_id:
                self._plays(response, frame)

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
                self._lanes.hold(response.id)

    def release(self) -> None:
        for response_id in self._held:
            self._lanes.release(response_id)
        self._held = []

    def discard(self, response_id: str) -> None:
        """Drop audio of a response that was not sent."""
        self._metrics.audio_dropped_s.inc(self._lanes.discard_audio(response_id))
        self._lanes.release(response_id)

    def interrupt(self) -> None:
        """The user speaks: playback of every response ends here."""
        self._echo.playback_stopped()
        for response in self._responses:
            if not self._monitor.over(response.playback):
                self.discard(response.id)
                heard_s = self._monitor.stopped(response.playback, barge_in=True)
                self._truncate(response, heard_s, emit=True)

    def cancel(self, response: ActiveResponse) -> None:
        """The client ended it. Without acks, the audio that was sent counts as heard until the
        client truncates the item."""
        self._echo.playback_stopped()
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
            self._port.item_truncated(item.id, int(item.heard_ms))

    def _plays(self, response: ActiveResponse, frame: bytes) -> None:
        if self._decoder.form != (form := response.plan.config.output_format):
            self._decoder = _Decoder(form)
        self._echo.playback_began(self._decoder.push(frame))

    def _find(self, item_id: str) -> ActiveResponse | None:
        return next((r for r in self._responses if r.item and r.item.id == item_id), None)


class _Decoder:
    """Wire frames as the echo filter compares them."""

    def __init__(self, form: WireFormat):
        self.form = form
        self._decoder = WireDecoder(form)
        self._halver = StreamResampler(INPUT_RATE_HZ, RATE_HZ)

    def push(self, frame: bytes) -> np.ndarray:
        """Returns [n] float32 at RATE_HZ."""
        pcm = self._halver.push(self._decoder.push(frame))
        return (pcm / 32_768).astype(np.float32)
