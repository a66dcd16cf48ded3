"""One response of the server, as far as it has arrived."""

from dataclasses import dataclass, field

from sglang_live.client import clip
from sglang_live.client.playback_clock import PlaybackClock


@dataclass(slots=True)
class Reply:
    response_id: str
    created_s: float
    playback: PlaybackClock
    item_id: str | None = None
    first_audio_s: float | None = None
    last_audio_s: float | None = None
    first_text_s: float | None = None
    flushed_s: float | None = None
    packets: int = 0
    pcm: bytearray = field(default_factory=bytearray)
    transcript: str = ""
    text_only: bool = False
    done_s: float | None = None
    status: str | None = None
    error: str | None = None

    def add_audio(self, packet: bytes, now_s: float) -> None:
        if self.first_audio_s is None:
            self.first_audio_s = now_s
        self.last_audio_s = now_s
        self.packets += 1
        self.pcm += packet
        self.playback.packet_received(clip.duration_s(packet))

    def flush(self, now_s: float) -> None:
        """The listener's device stops playing it."""
        self.playback.flush()
        self.flushed_s = now_s

    @property
    def playing(self) -> bool:
        """The listener hears it, or would if the next packet came."""
        if self.first_audio_s is None or self.flushed_s is not None:
            return False
        return self.done_s is None or self.playback.slack_s > 0

    @property
    def heard_s(self) -> float:
        """What the listener will have heard in the end: all of it, unless it was flushed."""
        playback = self.playback
        return playback.heard_s if playback.flushed else playback.received_s
