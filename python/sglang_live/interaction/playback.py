"""Playback: how much of one response's audio the user has heard, and has still to hear.

In: audio that the network took, the client's acks. Out: heard_s, playing, underruns; the number of
tokens that were heard.
Owner: one ResponsePlayback per response, with a PlaybackClock, kept by the session's monitor. Pure
given now_s, which never decreases.

Without acks the clock runs from the first packet on, one second per second, and stops when
everything sent has been played. Acks move it in both directions, and it runs on from there. An
ack may be late, wrong or forged, so it counts only up to what was sent and to what real time
allows.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from sglang_live.core import FRAME_S

# Clients round, and may play a packet before the network reports it as taken.
ACK_TOLERANCE_S = 0.25
# After this time without an ack the clock runs without acks again.
ACK_TIMEOUT_S = 2.0
# Acks advance packet by packet, at most 200 ms each; only a longer standstill is a pause.
STANDSTILL_S = 0.5
# The jitter buffer of a player hides gaps shorter than a packet.
MIN_UNDERRUN_S = 0.02
_EPSILON_S = 1e-6
# Codec frames per token until a session has a complete response: 155 words a minute, an ordinary
# pace of English speech, at 1.3 tokens a word and 12.5 frames a second.
PRIOR_FRAMES_PER_TOKEN = 12.5 / (155 / 60 * 1.3)
# Durations come from samples at other rates; rounding must not lose a frame.
_EPSILON_FRAMES = 1e-6

AckOutcome = Literal["accepted", "duplicate", "backwards", "beyond_sent", "too_fast", "early"]


class PlaybackClock:
    """
    Attributes:
        sent_s: audio the network took.
        underruns, underrun_s: number and total length of gaps in playback.
        acks: number of acks by outcome.
        ack_timeouts: how often acks ceased during playback.
        finished: no more audio will come. stopped: playback has ended for good.
        away: the client has no connection, so playback stands still until it says how far it came.
    """

    def __init__(self, not_before_s: float = float("-inf"), early_s: float | None = None) -> None:
        """
        Args:
            not_before_s: when the audio of earlier responses, played before this one, ends.
            early_s: audio is sent in step with its playback, each packet this long before it; a
                stop comes too late for what was sent. None: it is sent as it is made.
        """
        self.sent_s = 0.0
        self.underruns = 0
        self.underrun_s = 0.0
        self.acks: Counter[AckOutcome] = Counter()
        self.ack_timeouts = 0
        self.finished = False
        self.stopped = False
        self.away = False
        self._not_before_s = not_before_s
        self._early_s = early_s
        self._began_s: float | None = None
        # The last accepted point: at _at_s, _heard_s had been heard.
        self._heard_s = 0.0
        self._at_s = 0.0
        self._acked_s: float | None = None  # the furthest that was accepted
        self._still_since_s = 0.0
        self._last_ack_s: float | None = None  # None: the clock runs without acks
        self._paused = False

    @property
    def by_acks(self) -> bool:
        """Whether acks determine what was heard now."""
        return self._last_ack_s is not None

    def heard_s(self, now_s: float) -> float:
        if self._began_s is None:
            return 0.0
        if self.stopped or self.away:
            return min(self._heard_s, self.sent_s)
        return min(self.sent_s, self._heard_s + max(0.0, now_s - self._runs_from_s))

    def playing(self, now_s: float) -> bool:
        """Whether playback advances at this moment."""
        if self._began_s is None or self.stopped or self.away or now_s < self._runs_from_s:
            return False
        return self.heard_s(now_s) < self.sent_s - _EPSILON_S

    def over(self, now_s: float) -> bool:
        """Whether nothing of it will be heard from now on."""
        return self.stopped or (self.finished and self._is_dry(now_s))

    @property
    def dry_at_s(self) -> float:
        """When everything sent will have been heard, if nothing else happens."""
        return self._runs_from_s + self.sent_s - self._heard_s

    def next_change_s(self, now_s: float) -> float | None:
        """When `playing` will change by itself; None if it will not."""
        if self._began_s is None or self.stopped or self.away or self._is_dry(now_s):
            return None
        return self._runs_from_s if now_s < self._runs_from_s else self.dry_at_s

    def sent(self, duration_s: float, now_s: float) -> None:
        """The network took a packet."""
        self.check(now_s)
        if self._began_s is None:
            self._began_s = now_s
            self._at_s = max(now_s + (self._early_s or 0.0), self._not_before_s)
        elif not self.stopped and self._is_dry(now_s):
            self._count_underrun(now_s)
            self._restart(now_s)
        self.sent_s += duration_s

    def go_on(self, sent_s: float, heard_s: float, now_s: float) -> None:
        """Begin with the playback of a response that another server has sent so far."""
        if sent_s:
            self.sent_s, self._heard_s = sent_s, heard_s
            self._began_s, self._at_s = now_s - heard_s, now_s

    def ack(self, acked_s: float, now_s: float) -> AckOutcome:
        """The client reports that it has played acked_s."""
        self.check(now_s)
        outcome = self._judge(acked_s, now_s)
        self.acks[outcome] += 1
        if outcome == "duplicate":
            self._last_ack_s = now_s
            stood_still = now_s - self._still_since_s >= STANDSTILL_S
            if stood_still and acked_s < self.sent_s - _EPSILON_S and not self.stopped:
                self._paused = True
                self._heard_s = max(0.0, acked_s)
        elif outcome not in ("early", "backwards"):
            assert self._began_s is not None
            limit_s = min(self.sent_s, now_s - self._began_s + ACK_TOLERANCE_S)
            self._heard_s = max(0.0, min(acked_s, limit_s))
            self._at_s = now_s
            self._still_since_s = now_s
            self._last_ack_s = now_s
            self._paused = False
            if outcome == "accepted":
                self._acked_s = self._heard_s
        return outcome

    def finish(self, now_s: float) -> None:
        """Everything was sent: when it has played out, that is the end and no underrun."""
        self.check(now_s)
        self.finished = True

    def stop(self, now_s: float) -> float:
        """Playback ends here. Returns the seconds heard; acks may still correct them."""
        self.check(now_s)
        self._heard_s = self.heard_s(now_s) if self._early_s is None else self.sent_s
        self.stopped = True
        return self._heard_s

    def correct(self, heard_s: float, now_s: float) -> float:
        """The client stopped after heard_s, and that is final. Returns the seconds that count."""
        self.stop(now_s)
        self._heard_s = max(0.0, min(heard_s, self.sent_s))
        self._acked_s = self._heard_s
        return self._heard_s

    def excuse_silence(self, now_s: float) -> None:
        """Audio was held until now: the silence so far is no underrun."""
        if self._began_s is not None and not self.stopped and self._is_dry(now_s):
            self._restart(now_s)

    def leave(self, now_s: float) -> None:
        """The client has lost its connection."""
        self.check(now_s)
        self._heard_s = self.heard_s(now_s)
        self._at_s = max(now_s, self._at_s)
        self.away = True

    def possible_s(self, heard_s: float, now_s: float) -> float:
        """What counts of heard_s, which a client that was away says it has heard."""
        if self._began_s is None:
            return 0.0
        limit_s = min(self.sent_s, now_s - self._began_s + ACK_TOLERANCE_S)
        return max(self._acked_s or 0.0, min(heard_s, limit_s))

    def come_back(self, heard_s: float, now_s: float, from_s: float) -> None:
        """The client is there again, has heard heard_s, and plays the rest at from_s."""
        self.away = False
        if self.stopped:
            return
        self._heard_s = self.possible_s(heard_s, now_s)
        self._at_s = from_s
        self._still_since_s = now_s
        self._last_ack_s = None
        self._paused = False

    def check(self, now_s: float) -> None:
        """Detect that the client has stopped sending acks."""
        if self._last_ack_s is None or self.stopped or self.away:
            return
        until_s = self._last_ack_s + ACK_TIMEOUT_S
        # A client with nothing left to play sends no acks.
        if now_s <= until_s or self._is_dry(until_s):
            return
        self.ack_timeouts += 1
        if self._paused:
            self._paused = False
            self._at_s = until_s
        self._last_ack_s = None

    @property
    def _runs_from_s(self) -> float:
        """When playback leaves _heard_s. A pause without further acks ends by itself."""
        if self._paused:
            assert self._last_ack_s is not None
            return self._last_ack_s + ACK_TIMEOUT_S
        return self._at_s

    def _is_dry(self, now_s: float) -> bool:
        return self.heard_s(now_s) >= self.sent_s - _EPSILON_S

    def _judge(self, acked_s: float, now_s: float) -> AckOutcome:
        if self._began_s is None:
            return "early"
        if acked_s > self.sent_s + ACK_TOLERANCE_S:
            return "beyond_sent"
        if acked_s > now_s - self._began_s + ACK_TOLERANCE_S:
            return "too_fast"
        if self._acked_s is None or acked_s > self._acked_s + _EPSILON_S:
            return "accepted"
        # What was heard stays heard: less than before is an error of the client.
        return "duplicate" if acked_s > self._acked_s - _EPSILON_S else "backwards"

    def _count_underrun(self, now_s: float) -> None:
        silent_s = now_s - self.dry_at_s
        if not self.finished and silent_s >= MIN_UNDERRUN_S:
            self.underruns += 1
            self.underrun_s += silent_s

    def _restart(self, now_s: float) -> None:
        """All audio sent so far was heard; the next plays from now on."""
        self._heard_s = self.sent_s
        self._at_s = now_s + (self._early_s or 0.0)
        self._still_since_s = now_s
        if self._last_ack_s is not None:
            self._last_ack_s = now_s


@dataclass(eq=False, slots=True, kw_only=True)
class ResponsePlayback:
    """
    speed: of its audio. generated_s and the clock count seconds as they are played, the stages and
        spoken_s as they are made, which is `speed` times as much.
    generated_s: audio that the stages delivered, sent or not.
    unsent_since_s: when the oldest audio that is not sent was delivered.
    text_tokens: tokens of its text, once that is complete; before, None.
    spoken_s: duration of all its audio, once the talker has ended it; before, None.
    retired: the monitor does not follow it any more.
    was_playing, was_over: state at the last update.
    logged_s: when the timeline last got a `sent` event.
    """

    response_id: str
    clock: PlaybackClock
    speed: float = 1.0
    generated_s: float = 0.0
    unsent_since_s: float = 0.0
    text_tokens: int | None = None
    spoken_s: float | None = None
    retired: bool = False
    was_playing: bool = False
    was_over: bool = False
    logged_s: float = float("-inf")

    def to_play_s(self, now_s: float, frames_per_token: float) -> float:
        """Seconds of audio that the user has still to hear: LiveServe's T_play.

        The talker is seconds ahead of playback at most, because it is paused beyond that, while
        the text of a minute may be complete. So complete text counts by its expected audio, until
        the audio itself is complete. While there is more text to come, this is a lower bound.

        Args:
            frames_per_token: expected codec frames per token of the text.
        """
        clock = self.clock
        if clock.stopped:
            return 0.0
        whole_s = clock.sent_s
        if clock.finished:
            pass
        elif self.spoken_s is not None:
            whole_s = max(whole_s, self.spoken_s / self.speed)
        elif self.text_tokens is not None:
            expected_s = self.text_tokens * frames_per_token * FRAME_S
            whole_s = max(whole_s, expected_s / self.speed)
        return whole_s - clock.heard_s(now_s)


def heard_tokens(
    heard_s: float, *, n_tokens: int, n_frames: int, spoken: bool, frames_per_token: float
) -> int:
    """Count the tokens that were heard in full; never falls while heard_s grows.

    The models give no alignment of text and audio, so this is an estimate with two exact bounds: no
    token is spoken before the talker has it, and all of the audio contains all of the text.

    Args:
        n_tokens: tokens of the response that were generated so far.
        n_frames: codec frames of its audio; used only if spoken.
        spoken: the audio is complete, so tokens are spread evenly over it.
        frames_per_token: average of this user's session; used for audio that is not complete.
    """
    frames = heard_s / FRAME_S + _EPSILON_FRAMES
    if heard_s <= 0 or n_tokens <= 0:
        return 0
    if not spoken or n_frames <= 0:
        return min(int(frames / frames_per_token), _spoken(frames), n_tokens)
    if frames >= n_frames:
        return n_tokens
    # The last frame was not heard, so neither was the last token.
    spread = int(frames * n_tokens / n_frames)
    return min(spread, _spoken(frames), n_tokens - 1)


def _spoken(frames: float) -> int:
    # The talker's prompt holds the first token, and every step has one more.
    return int(frames) + 1
