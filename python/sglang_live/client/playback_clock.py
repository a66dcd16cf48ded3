"""Playback clock: which of the audio that has arrived a user hears, and when playback stalls.

In: packet_received, flush. Out: gaps_s, chunks_on_time, wait_until_played, read by the turn's
record. Owner: one PlaybackClock per response. Playback starts with the first packet, without a
jitter buffer, so that every audible stall counts.
"""

from sglang_live.clock import Clock

# A stall of this length is audible: the threshold of vLLM-Omni and of LiveServe.
AUDIBLE_GAP_S = 0.100


class PlaybackClock:
    """Playback of one response.

    gaps_s: lengths of the stalls.
    chunks_due, chunks_on_time: streaming viability, VoxServe eq. 2, over chunks 2…; a chunk is on
        time if it arrives before the end of the chunks before it, had none of them been late.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._first_s: float | None = None
        # End of the received audio. Meaningless before the first packet.
        self._ends_s = 0.0
        self._flushed_at_heard_s: float | None = None
        self.received_s = 0.0
        self.gaps_s: list[float] = []
        self.chunks_due = 0
        self.chunks_on_time = 0

    def packet_received(self, audio_s: float) -> None:
        """A packet with this duration of audio arrived now."""
        if not self.flushed:
            self._play(audio_s)
        self.received_s += audio_s

    def flush(self) -> None:
        """Stop now, and play no later packet: the user speaks."""
        self._flushed_at_heard_s = self.heard_s

    @property
    def flushed(self) -> bool:
        return self._flushed_at_heard_s is not None

    @property
    def buffered_s(self) -> float:
        """Audio that is still to be played; negative: length of the silence so far."""
        if self._first_s is None or self.flushed:
            return 0.0
        return self._ends_s - self._clock.now_s()

    @property
    def heard_s(self) -> float:
        if self._flushed_at_heard_s is not None:
            return self._flushed_at_heard_s
        return self.received_s - max(0.0, self.buffered_s)

    @property
    def audible_gaps(self) -> int:
        return sum(gap_s > AUDIBLE_GAP_S for gap_s in self.gaps_s)

    async def wait_until_played(self) -> None:
        # A packet may arrive during the wait.
        while (buffered_s := self.buffered_s) > 0:
            await self._clock.sleep(buffered_s)

    def _play(self, audio_s: float) -> None:
        now_s = self._clock.now_s()
        if self._first_s is None:
            self._first_s = now_s
            self._ends_s = now_s
        else:
            self.chunks_due += 1
            self.chunks_on_time += now_s <= self._first_s + self.received_s
            if now_s > self._ends_s:
                self.gaps_s.append(now_s - self._ends_s)
                self._ends_s = now_s
        self._ends_s += audio_s
