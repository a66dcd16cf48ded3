"""Playback clock: what a listener hears of the audio that has arrived, and when it stalls.

In: packet_received. Out: gaps_s, wait_until_played, read by the turn's record.
Owner: one PlaybackClock per reply. It plays from the first packet, without a jitter buffer,
so every stall that a listener could hear is counted.
"""

from sglang_live.clock import Clock

# A stall of this length is heard as a break: vLLM-Omni's threshold, also LiveServe's.
AUDIBLE_GAP_S = 0.100


class PlaybackClock:
    def __init__(self, clock: Clock):
        self._clock = clock
        self._dry_at_s: float | None = None
        self.received_s = 0.0
        self.gaps_s: list[float] = []

    def packet_received(self, audio_s: float) -> None:
        """A packet with this much audio arrived now."""
        now_s = self._clock.now_s()
        if self._dry_at_s is None:
            self._dry_at_s = now_s
        elif now_s > self._dry_at_s:
            self.gaps_s.append(now_s - self._dry_at_s)
            self._dry_at_s = now_s
        self._dry_at_s += audio_s
        self.received_s += audio_s

    @property
    def slack_s(self) -> float:
        """Audio still to be heard; negative: silent for this long."""
        if self._dry_at_s is None:
            return 0.0
        return self._dry_at_s - self._clock.now_s()

    @property
    def heard_s(self) -> float:
        return self.received_s - max(0.0, self.slack_s)

    @property
    def audible_gaps(self) -> int:
        return sum(gap_s > AUDIBLE_GAP_S for gap_s in self.gaps_s)

    async def wait_until_played(self) -> None:
        # A packet may arrive during the wait, so look again afterwards.
        while (slack_s := self.slack_s) > 0:
            await self._clock.sleep(slack_s)
