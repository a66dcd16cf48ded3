"""One response of the server, as far as it has arrived."""

from dataclasses import dataclass, field

from sglang_live.client import clip
from sglang_live.client.playback_clock import PlaybackClock


@dataclass(slots=True)
class Response:
    """A response and its audio. All times are those of the client's clock.

    item_id: its assistant item; None before the first audio.
    flushed_s: time at which the user's device stopped to play it; None: it did not.
    text_only: whether it is a written response.
    done_s: time of response.done; None: the response is not over.
    status: its own status; None: the response is not over.
    """

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
        """Stop its playback on the user's device."""
        self.playback.flush()
        self.flushed_s = now_s

    @property
    def playing(self) -> bool:
        """Whether the user hears it, or would hear its next packet."""
        if self.first_audio_s is None or self.flushed_s is not None:
            return False
        return self.done_s is None or self.playback.buffered_s > 0

    @property
    def generation_s(self) -> float | None:
        """Time from response.created to the last audio packet; None without audio."""
        return None if self.last_audio_s is None else self.last_audio_s - self.created_s

    @property
    def heard_s(self) -> float:
        """Audio that the user hears in the end: all of it, unless it was flushed."""
        playback = self.playback
        return playback.heard_s if playback.flushed else playback.received_s
