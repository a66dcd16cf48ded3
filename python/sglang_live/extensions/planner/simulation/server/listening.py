"""What the client has of a response."""

from collections.abc import Callable

from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.extensions.planner.simulation.events import Events


class Listening:
    """What the client has of a response. Times are those of the simulation.

    Attributes:
        done_s: when response.done came; None: it has not.
        packets: audio packets.
        item_id: of its item in the conversation; "" before that is known.
    """

    def __init__(self, events: Events, changed: Callable[[], None]):
        self._events = events
        self.changed = changed
        self.created_s = events.now_s()
        self.playback = PlaybackClock(events)
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.flushed_s: float | None = None
        self.done_s: float | None = None
        self.status: str | None = None
        self.packets = 0
        self.item_id = ""

    def audio(self, audio_s: float) -> None:
        now_s = self._events.now_s()
        self.last_s = now_s
        self.packets += 1
        self.playback.packet_received(audio_s)
        if self.first_s is None:
            self.first_s = now_s
            self.changed()

    def done(self, status: str) -> None:
        self.done_s = self._events.now_s()
        self.status = status
        self.changed()

    def flush(self) -> None:
        if not self.playback.flushed:
            self.playback.flush()
            self.flushed_s = self._events.now_s()

    @property
    def is_playing(self) -> bool:
        if self.first_s is None or self.playback.flushed:
            return False
        return self.done_s is None or self.playback.buffered_s > 0

    @property
    def heard_s(self) -> float:
        flushed = self.playback.flushed
        return self.playback.heard_s if flushed else self.playback.received_s
