"""Playback clock: how much of one response's audio the user has heard.

In: audio that the network took, the client's acks. Out: heard_s, playing, underruns.
Owner: one PlaybackClock per response. Pure given now_s, which never decreases.

Without acks the clock runs from the first packet on, one second per second, and stops when
everything sent has been played. Acks move it in both directions, and it runs on from there. An
ack may be late, wrong or forged, so it counts only up to what was sent and to what real time
allows.
"""

from collections import Counter
from typing import Literal

# Clients round, and may play a packet before the network reports it as taken.
ACK_TOLERANCE_S = 0.25
# After this time without an ack the clock runs without acks again.
ACK_TIMEOUT_S = 2.0
# A position advances packet by packet, at most 200 ms each; only a longer standstill is a pause.
STANDSTILL_S = 0.5
# The jitter buffer of a player hides gaps shorter than a packet.
MIN_UNDERRUN_S = 0.02
_EPSILON_S = 1e-6

AckOutcome = Literal["accepted", "duplicate", "backwards", "beyond_sent", "too_fast", "early"]


class PlaybackClock:
    """
    Attributes:
        sent_s: audio the network took.
        underruns, underrun_s: number and total length of gaps in playback.
        acks: number of acks by outcome.
        ack_timeouts: how often acks ceased during playback.
        finished: no more audio will come. stopped: playback has ended for good.
    """

    def __init__(self, not_before_s: float = float("-inf")) -> None:
        """not_before_s: when the audio of earlier responses, played before this one, ends."""
        self.sent_s = 0.0
        self.underruns = 0
        self.underrun_s = 0.0
        self.acks: Counter[AckOutcome] = Counter()
        self.ack_timeouts = 0
        self.finished = self.stopped = False
        self._not_before_s = not_before_s
        self._began_s: float | None = None
        # The last accepted point: at _at_s playback was at _position_s.
        self._position_s = self._at_s = 0.0
        self._acked_s: float | None = None  # furthest position that was accepted
        self._still_since_s = 0.0
        self._last_ack_s: float | None = None  # None: the clock runs without acks
        self._paused = False

    @property
    def by_acks(self) -> bool:
        """Whether acks determine the position now."""
        return self._last_ack_s is not None

    def heard_s(self, now_s: float) -> float:
        if self._began_s is None:
            return 0.0
        if self.stopped:
            return min(self._position_s, self.sent_s)
        return min(self.sent_s, self._position_s + max(0.0, now_s - self._runs_from_s))

    def playing(self, now_s: float) -> bool:
        """Whether playback advances at this moment."""
        if self._began_s is None or self.stopped or now_s < self._runs_from_s:
            return False
        return self.heard_s(now_s) < self.sent_s - _EPSILON_S

    def over(self, now_s: float) -> bool:
        """Whether nothing of it will be heard from now on."""
        return self.stopped or (self.finished and self._is_dry(now_s))

    @property
    def dry_at_s(self) -> float:
        """When everything sent will have been heard, if nothing else happens."""
        return self._runs_from_s + self.sent_s - self._position_s

    def next_change_s(self, now_s: float) -> float | None:
        """When `playing` will change by itself; None if it will not."""
        if self._began_s is None or self.stopped or self._is_dry(now_s):
            return None
        return self._runs_from_s if now_s < self._runs_from_s else self.dry_at_s

    def sent(self, duration_s: float, now_s: float) -> None:
        """The network took a packet."""
        self.check(now_s)
        if self._began_s is None:
            self._began_s = now_s
            self._at_s = max(now_s, self._not_before_s)
        elif not self.stopped and self._is_dry(now_s):
            self._count_underrun(now_s)
            self._restart(now_s)
        self.sent_s += duration_s

    def ack(self, position_s: float, now_s: float) -> AckOutcome:
        """The client reports that it has played up to position_s."""
        self.check(now_s)
        outcome = self._judge(position_s, now_s)
        self.acks[outcome] += 1
        if outcome == "duplicate":
            self._last_ack_s = now_s
            stood_still = now_s - self._still_since_s >= STANDSTILL_S
            if stood_still and position_s < self.sent_s - _EPSILON_S and not self.stopped:
                self._paused, self._position_s = True, max(0.0, position_s)
        elif outcome not in ("early", "backwards"):
            assert self._began_s is not None
            limit_s = min(self.sent_s, now_s - self._began_s + ACK_TOLERANCE_S)
            self._position_s, self._at_s = max(0.0, min(position_s, limit_s)), now_s
            self._still_since_s = self._last_ack_s = now_s
            self._paused = False
            if outcome == "accepted":
                self._acked_s = self._position_s
        return outcome

    def finish(self, now_s: float) -> None:
        """Everything was sent: when it has played out, that is the end and no underrun."""
        self.check(now_s)
        self.finished = True

    def stop(self, now_s: float) -> float:
        """Playback ends here. Returns the seconds heard; acks may still correct them."""
        self.check(now_s)
        self._position_s = self.heard_s(now_s)
        self.stopped = True
        return self._position_s

    def correct(self, position_s: float, now_s: float) -> float:
        """The client stopped at position_s, and that is final. Returns the seconds that count."""
        self.stop(now_s)
        self._position_s = max(0.0, min(position_s, self.sent_s))
        self._acked_s = self._position_s
        return self._position_s

    def excuse_silence(self, now_s: float) -> None:
        """Audio was held until now: the silence so far is no underrun."""
        if self._began_s is not None and not self.stopped and self._is_dry(now_s):
            self._restart(now_s)

    def check(self, now_s: float) -> None:
        """Detect that the client has stopped sending acks."""
        if self._last_ack_s is None or self.stopped:
            return
        until_s = self._last_ack_s + ACK_TIMEOUT_S
        # A client with nothing left to play sends no acks.
        if now_s <= until_s or self._is_dry(until_s):
            return
        self.ack_timeouts += 1
        if self._paused:
            self._paused, self._at_s = False, until_s
        self._last_ack_s = None

    @property
    def _runs_from_s(self) -> float:
        """When playback leaves _position_s. A pause without further acks ends by itself."""
        if self._paused:
            assert self._last_ack_s is not None
            return self._last_ack_s + ACK_TIMEOUT_S
        return self._at_s

    def _is_dry(self, now_s: float) -> bool:
        return self.heard_s(now_s) >= self.sent_s - _EPSILON_S

    def _judge(self, position_s: float, now_s: float) -> AckOutcome:
        if self._began_s is None:
            return "early"
        if position_s > self.sent_s + ACK_TOLERANCE_S:
            return "beyond_sent"
        if position_s > now_s - self._began_s + ACK_TOLERANCE_S:
            return "too_fast"
        if self._acked_s is None or position_s > self._acked_s + _EPSILON_S:
            return "accepted"
        # What was heard stays heard: a decreasing position is an error of the client.
        return "duplicate" if position_s > self._acked_s - _EPSILON_S else "backwards"

    def _count_underrun(self, now_s: float) -> None:
        silent_s = now_s - self.dry_at_s
        if not self.finished and silent_s >= MIN_UNDERRUN_S:
            self.underruns += 1
            self.underrun_s += silent_s

    def _restart(self, now_s: float) -> None:
        """All audio sent so far was heard; the next plays from now on."""
        self._position_s, self._at_s = self.sent_s, now_s
        self._still_since_s = now_s
        if self._last_ack_s is not None:
            self._last_ack_s = now_s
