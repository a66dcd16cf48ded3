"""The facts of one session: who speaks, what was sent, what was heard.

In: speech events, audio generated and sent, acks, ends of responses. Out: playback reports for
the stages, UserStats, a timeline, metrics.
Owner: one SessionMonitor per session. It never blocks and decides nothing; its only task of its
own wakes at the moments at which playback starts or runs out.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sglang_live.aio import background
from sglang_live.clock import Clock
from sglang_live.core import FRAME_S
from sglang_live.interaction.playback import PlaybackClock, ResponsePlayback
from sglang_live.interaction.timeline import Timeline
from sglang_live.interaction.user_stats import UserPrior, UserStats
from sglang_live.interaction.vad import EndReason
from sglang_live.orchestrator.sessions import VoiceSession
from sglang_live.orchestrator.turn_control import REPORT_EVERY_S
from sglang_live.telemetry.metrics import GatewayMetrics

# A stage step begins anywhere within a codec frame, so a finer report would change no decision.
REPORT_TOLERANCE_S = 0.08
# The onset of the user's next speech cannot be predicted more closely than this.
NEXT_USE_TOLERANCE_S = 0.5
_SENT_EVERY_S = 0.2
# Shorter than the time for which the thinker protects the KV of a user who speaks.
_SPEECH_EVERY_S = 4.0
# Audio that the encoder keeps until its next frame is complete, at most; a change of speed keeps
# some of what was made.
_ENCODER_DELAY_S, _TEMPO_DELAY_S = 0.05, 0.05
# A client may create one response after another and play them in order.
_MAX_RESPONSES = 16


@dataclass(slots=True)
class _PlaybackReport:
    """The last report on the running turn, from which the stages extrapolate."""

    heard_s: float
    playing: bool
    at_s: float

    def extrapolated_s(self, now_s: float) -> float:
        return self.heard_s + (now_s - self.at_s if self.playing else 0.0)


class SessionMonitor:
    """
    playbacks: of the responses that may still be heard, oldest first.
    """

    def __init__(
        self,
        session: VoiceSession,
        clock: Clock,
        metrics: GatewayMetrics,
        timeline: Timeline,
        user_prior: UserPrior,
        early_s: float | None = None,
    ):
        """early_s: of the playback clocks."""
        self.user_stats = UserStats(user_prior)
        self.timeline = timeline
        self.playbacks: list[ResponsePlayback] = []
        self._early_s = early_s
        self._session = session
        self._clock = clock
        self._metrics = metrics
        self._running: ResponsePlayback | None = None  # of the turn that the stages work on
        self._reported = _PlaybackReport(0.0, False, 0.0)
        self._reported_end_s = float("-inf")  # end of playback as last reported to the stages
        self._played_out_s: float | None = None
        self._speech_reported_s = float("-inf")
        self._watcher: asyncio.Task[None] | None = None
        self._wakes_s = 0.0
        session.watch(self._stream_changed)

    @property
    def now_s(self) -> float:
        return self._clock.now_s()

    # --- the user ---

    def speech_suspected(self, onset_s: float) -> None:
        self._report_speech()
        self._note("speech_suspected", onset_t_s=self.timeline.t_s(onset_s))

    def speech_dismissed(self, decision: str, reason: str) -> None:
        self._session.report_speech(speaks=False)
        self._note("speech_dismissed", decision=decision, reason=reason)

    def speech_started(self, onset_s: float) -> None:
        self._report_speech()
        self._note("speech_started", onset_t_s=self.timeline.t_s(onset_s))
        if self._played_out_s is not None and not any(map(self.audible, self.playbacks)):
            gap_s = max(0.0, onset_s - self._played_out_s)
            self.user_stats.add_gap(gap_s)
            self._report_next_use(self._clock.now_s(), observed_gap_s=gap_s)
        self._played_out_s = None

    def speech_continues(self) -> None:
        """More audio has come, and the turn goes on."""
        if self._clock.now_s() - self._speech_reported_s >= _SPEECH_EVERY_S:
            self._report_speech()

    def _report_speech(self) -> None:
        self._speech_reported_s = self._clock.now_s()
        self._session.report_speech()

    def speech_stopped(self, reason: EndReason) -> None:
        self._metrics.turn_ends.labels(reason).inc()
        self._note("speech_stopped", reason=reason)

    def other_sound(self, what: Literal["echo", "side_talk", "other_voice"]) -> None:
        """The first of it after a while without."""
        self._note(what)

    def turn_committed(self) -> None:
        self._note("turn_committed")

    def held(self) -> None:
        self._note("held")

    def released(self) -> None:
        now_s = self._clock.now_s()
        for playback in self.playbacks:
            playback.clock.excuse_silence(now_s)
        self._note("released")

    def client_left(self) -> None:
        """Its connection is lost: nothing is heard until client_returned()."""
        now_s = self._clock.now_s()
        for playback in self.playbacks:
            playback.clock.leave(now_s)
        self._note("client_left")
        self._refresh(now_s)

    def client_returned(self, heard_s: Mapping[str, float]) -> None:
        """heard_s: by response, what the client has heard; of others, what was heard before."""
        now_s = from_s = self._clock.now_s()
        for playback in self.playbacks:
            clock = playback.clock
            heard = heard_s.get(playback.response_id, clock.heard_s(now_s))
            clock.come_back(heard, now_s, from_s)
            playback.was_over = playback.was_over and clock.over(now_s)
            from_s = max(from_s, clock.dry_at_s) if self.audible(playback) else from_s
        self._note("client_returned")
        self._refresh(now_s)

    # --- a response ---

    def response_created(self, response_id: str, speed: float = 1.0) -> ResponsePlayback:
        now_s = self._clock.now_s()
        self._update(now_s)
        oldest_kept = len(self.playbacks) - _MAX_RESPONSES + 1
        for n, playback in enumerate(self.playbacks):
            if playback.clock.over(now_s) or n < oldest_kept:
                self._retire(playback)
        self.playbacks = [playback for playback in self.playbacks if not playback.retired]
        queued_s = [p.clock.dry_at_s for p in self.playbacks if p.clock.sent_s]
        playback = ResponsePlayback(
            response_id=response_id,
            clock=PlaybackClock(max(queued_s, default=float("-inf")), self._early_s),
            speed=speed,
        )
        self.playbacks.append(playback)
        self._played_out_s = None
        self._note("response_created", playback)
        return playback

    def turn_started(self, playback: ResponsePlayback) -> None:
        """The stages begin with this response's turn; reports are about it from now on."""
        self._running = playback
        self._report_playback(0.0, False, self._clock.now_s())

    def turn_ended(self, playback: ResponsePlayback) -> None:
        if self._running is playback:
            self._running = None

    def text_completed(self, playback: ResponsePlayback, n_tokens: int) -> None:
        """Its text is complete, and n_tokens of it are spoken."""
        playback.text_tokens = n_tokens
        self._correct_next_use(self._clock.now_s(), NEXT_USE_TOLERANCE_S)

    def audio_generated(self, playback: ResponsePlayback, duration_s: float) -> None:
        """duration_s: as it was made."""
        held_s = _ENCODER_DELAY_S
        if playback.speed != 1:
            held_s += _TEMPO_DELAY_S / playback.speed
        if playback.generated_s <= playback.clock.sent_s + held_s:
            playback.unsent_since_s = self._clock.now_s()
        playback.generated_s += duration_s / playback.speed

    def audio_sent(self, playback: ResponsePlayback, duration_s: float) -> None:
        """The network took duration_s of its audio."""
        now_s, clock = self._clock.now_s(), playback.clock
        is_first = not clock.sent_s
        if is_first:
            self._note("first_audio", playback)
        silent_s, n_underruns = clock.underrun_s, clock.underruns
        dry_at_s = clock.dry_at_s if not is_first else now_s
        clock.sent(duration_s, now_s)
        self._metrics.audio_sent_s.inc(duration_s)
        if clock.underruns > n_underruns:
            silent_s = clock.underrun_s - silent_s
            self._metrics.underruns.inc()
            self._metrics.underrun_s.inc(silent_s)
            # Audio that was generated and not sent is the network's fault: the stages must not
            # favour this session for it at the cost of others.
            unsent_s = max(0.0, playback.unsent_since_s - dry_at_s)
            self._session.report_underrun(min(silent_s, unsent_s))
            self._note("underrun", playback, silent_s=silent_s)
        if now_s - playback.logged_s >= _SENT_EVERY_S:
            self._note_sent(playback, now_s)
        if is_first:
            self._report_next_use(now_s)
        self._refresh(now_s)

    def all_audio_sent(self, playback: ResponsePlayback) -> None:
        """No more audio will be sent for it."""
        if playback.clock.finished:
            return
        now_s = self._clock.now_s()
        playback.clock.finish(now_s)
        if playback.clock.sent_s:
            self._note_sent(playback, now_s)
        self._correct_next_use(now_s, REPORT_TOLERANCE_S)
        self._refresh(now_s)

    def response_done(self, playback: ResponsePlayback, status: str) -> None:
        self._note("response_done", playback, status=status)

    def turn_result(
        self,
        playback: ResponsePlayback,
        *,
        n_tokens: int,
        n_frames: int,
        spoken: bool,
        marks: dict[str, float] | None = None,
    ) -> None:
        """The turn has ended with n_tokens of text and n_frames of audio.

        Args:
            spoken: the audio is complete.
            marks: seconds since the turn began, by name (telemetry/trace.py).
        """
        if spoken:
            # Tokens of function calls are not spoken.
            n_spoken = n_tokens if playback.text_tokens is None else playback.text_tokens
            self.user_stats.add_pace(n_tokens=n_spoken, n_frames=n_frames)
            playback.spoken_s = n_frames * FRAME_S
            self._correct_next_use(self._clock.now_s(), REPORT_TOLERANCE_S)
        facts = {"marks": {name: round(at_s, 3) for name, at_s in marks.items()}} if marks else {}
        self._note(
            "turn_result", playback, n_tokens=n_tokens, n_frames=n_frames, spoken=spoken, **facts
        )

    def _stream_changed(self, stage: str, what: str, buffered_s: float) -> None:
        self._note("stream", self._running, stage=stage, what=what, buffered_s=buffered_s)

    # --- its playback ---

    def audible(self, playback: ResponsePlayback) -> bool:
        """Whether some of it was sent and the user has not heard all of it."""
        return playback.clock.sent_s > 0 and not self.over(playback)

    def over(self, playback: ResponsePlayback) -> bool:
        """Whether nothing of it will be heard from now on."""
        return playback.clock.over(self._clock.now_s())

    def unheard_s(self, playback: ResponsePlayback) -> float:
        """Seconds of sent audio that the user has still to hear."""
        now_s = self._clock.now_s()
        return 0.0 if self.over(playback) else playback.clock.sent_s - playback.clock.heard_s(now_s)

    def stopped(self, playback: ResponsePlayback, *, barge_in: bool) -> float:
        """Playback ends here. Returns the seconds that were heard."""
        now_s = self._clock.now_s()
        playback.was_over = True
        heard_s = playback.clock.stop(now_s)
        self._note(
            "barge_in" if barge_in else "stopped",
            playback,
            heard_s=heard_s,
            sent_s=playback.clock.sent_s,
            generated_s=playback.generated_s,
        )
        self._correct_next_use(now_s, REPORT_TOLERANCE_S)
        self._refresh(now_s)
        return heard_s

    def acked(self, playback: ResponsePlayback, acked_s: float) -> float:
        """The client reports that it has played acked_s. Returns the seconds heard."""
        now_s = self._clock.now_s()
        outcome = playback.clock.ack(acked_s, now_s)
        self._metrics.acks.labels(outcome).inc()
        heard_s = playback.clock.heard_s(now_s)
        self._note("ack", playback, acked_s=acked_s, outcome=outcome, heard_s=heard_s)
        self._refresh(now_s)
        return heard_s

    def truncated(self, playback: ResponsePlayback, heard_s: float) -> None:
        """The client truncated its item to what was heard."""
        now_s = self._clock.now_s()
        self._note("truncated", playback, heard_s=heard_s)
        # While more audio comes, a client may play on after a truncation. With the clock stopped
        # the stages would never continue that response.
        if playback.clock.finished or playback.clock.stopped:
            playback.was_over = True
            playback.clock.correct(heard_s, now_s)
            self._correct_next_use(now_s, REPORT_TOLERANCE_S)
        self._refresh(now_s)

    def close(self) -> None:
        """End the timer, and count the last responses."""
        if self._watcher:
            self._watcher.cancel()
            self._watcher = None
        for playback in self.playbacks:
            self._retire(playback)
        self.playbacks = []

    # --- reports ---

    def _refresh(self, now_s: float) -> None:
        self._update(now_s)
        self._correct_next_use(now_s, NEXT_USE_TOLERANCE_S)
        due_s = self._next_change_s(now_s)
        watches = self._watcher is not None and not self._watcher.done()
        if due_s is None or (watches and self._wakes_s <= due_s):
            return
        if self._watcher:
            self._watcher.cancel()
        self._wakes_s = due_s
        self._watcher = background(self._watch(), "playback")

    async def _watch(self) -> None:
        """Update at every moment at which playback starts or runs out by itself."""
        while True:
            now_s = self._clock.now_s()
            due_s = self._next_change_s(now_s)
            if due_s is None:
                self._watcher = None
                return
            self._wakes_s = due_s
            await self._clock.sleep(due_s - now_s)
            self._update(self._clock.now_s())

    def _next_change_s(self, now_s: float) -> float | None:
        changes = [playback.clock.next_change_s(now_s) for playback in self.playbacks]
        if self._running in self.playbacks and self._running.clock.sent_s:
            changes.append(self._reported.at_s + REPORT_EVERY_S)
        return min((at_s for at_s in changes if at_s is not None), default=None)

    def _update(self, now_s: float) -> None:
        """Note what has changed since the last update; report it if the stages' estimate is off."""
        for playback in self.playbacks:
            clock = playback.clock
            n_timeouts = clock.ack_timeouts
            clock.check(now_s)
            if clock.ack_timeouts > n_timeouts:
                self._metrics.ack_timeouts.inc()
                self._note("ack_timeout", playback)
            heard_s, playing = clock.heard_s(now_s), clock.playing(now_s)
            if playing != playback.was_playing:
                playback.was_playing = playing
                self._note("playing" if playing else "dry", playback, heard_s=heard_s)
            if not playback.was_over and clock.over(now_s):
                playback.was_over = True
                if clock.sent_s:
                    self._played_out_s = clock.dry_at_s
            if playback is self._running:
                off_s = abs(self._reported.extrapolated_s(now_s) - heard_s)
                is_old = clock.sent_s and now_s >= self._reported.at_s + REPORT_EVERY_S
                if playing != self._reported.playing or off_s > REPORT_TOLERANCE_S or is_old:
                    self._report_playback(heard_s, playing, now_s)

    def _report_playback(self, heard_s: float, playing: bool, now_s: float) -> None:
        self._reported = _PlaybackReport(heard_s, playing, now_s)
        speed = self._running.speed if self._running else 1.0
        self._session.report_playback(speed * heard_s, playing, speed)

    def _correct_next_use(self, now_s: float, tolerance_s: float) -> None:
        """Report when playback ends, unless the last report says so within tolerance_s."""
        reported_s = max(0.0, self._reported_end_s - now_s)
        if abs(self._to_play_s(now_s) - reported_s) > tolerance_s:
            self._report_next_use(now_s)

    def _report_next_use(self, now_s: float, observed_gap_s: float | None = None) -> None:
        to_play_s = self._to_play_s(now_s)
        self._reported_end_s = now_s + to_play_s
        self._session.report_next_use(to_play_s, self.user_stats.response_gap_s, observed_gap_s)

    def _to_play_s(self, now_s: float) -> float:
        """Audio that is still to be heard, of all responses: a client plays one after another."""
        pace = self.user_stats.frames_per_token
        return sum((playback.to_play_s(now_s, pace) for playback in self.playbacks), 0.0)

    def _retire(self, playback: ResponsePlayback) -> None:
        playback.retired = True
        heard_s = playback.clock.heard_s(self._clock.now_s())
        self._metrics.audio_heard_s.inc(heard_s)
        self._metrics.audio_unheard_s.inc(playback.clock.sent_s - heard_s)

    def _note_sent(self, playback: ResponsePlayback, now_s: float) -> None:
        playback.logged_s = now_s
        self._note(
            "sent",
            playback,
            sent_s=playback.clock.sent_s,
            heard_s=playback.clock.heard_s(now_s),
            generated_s=playback.generated_s,
        )

    def _note(self, event: str, playback: ResponsePlayback | None = None, **facts: Any) -> None:
        if playback:
            facts = {"response": playback.response_id, **facts}
        self.timeline.add(event, self._clock.now_s(), **facts)
