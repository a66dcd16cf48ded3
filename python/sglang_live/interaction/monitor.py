"""The facts of one session: who speaks, what was sent, what was heard.

In: speech events, audio generated and sent, acks, ends of responses. Out: playback reports for
the stages, user_stats of the caller, a timeline, metrics.
Owner: one SessionMonitor per session. It never blocks and decides nothing; besides what it is
told it only looks up when playback of what was sent must have come to its end.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from sglang_live.clock import Clock
from sglang_live.interaction.playback import PlaybackClock
from sglang_live.interaction.timeline import Timeline
from sglang_live.interaction.user_stats import UserPrior, UserStats
from sglang_live.orchestrator.session import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

# The stages know when a step of theirs begins no better than to a frame.
REPORT_TOLERANCE_S = 0.08
# A caller's next word cannot be foretold to less than this.
OUTLOOK_TOLERANCE_S = 0.5
_SENT_EVERY_S = 0.2
# An encoder holds back so much at most until there is more.
_HELD_BACK_S = 0.05
# A client may ask for answer after answer and play them one by one.
_MAX_REPLIES = 16


@dataclass(eq=False, slots=True, kw_only=True)
class Reply:
    """The audio of one response in the conversation.

    generated_s: audio the stages delivered, sent or not.
    unsent_since_s: when the first of it came that the network has not taken.
    retired: too old to change anything.
    """

    response_id: str
    playback: PlaybackClock
    generated_s: float = 0.0
    unsent_since_s: float = 0.0
    retired: bool = False
    was_playing: bool = False
    was_over: bool = False
    logged_s: float = float("-inf")


@dataclass(slots=True)
class _Told:
    """What the stages assume of the running turn: the last report, extrapolated."""

    heard_s: float
    playing: bool
    at_s: float

    def heard_by(self, now_s: float) -> float:
        return self.heard_s + (now_s - self.at_s if self.playing else 0.0)


class SessionMonitor:
    def __init__(
        self,
        session: VoiceSession,
        clock: Clock,
        metrics: GatewayMetrics,
        timeline: Timeline,
        user_prior: UserPrior,
    ):
        self.user_stats = UserStats(user_prior)
        self.timeline = timeline
        self.replies: list[Reply] = []  # oldest first; the last is the current one
        self._session = session
        self._clock = clock
        self._metrics = metrics
        self._turn: Reply | None = None  # the stages work on it
        self._told = _Told(0.0, False, 0.0)
        self._told_end_s = float("-inf")  # when the stages expect silence
        self._played_out_s: float | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._wakes_s = 0.0
        session.watch(self._stream)

    # --- the caller ---

    def speech_suspected(self, onset_s: float) -> None:
        self._session.report_speech()
        self._note("speech_suspected", onset_t_s=self.timeline.t_s(onset_s))

    def speech_dismissed(self) -> None:
        self._note("speech_dismissed")

    def speech_started(self, onset_s: float) -> None:
        self._session.report_speech()
        self._note("speech_started", onset_t_s=self.timeline.t_s(onset_s))
        if self._played_out_s is not None and not any(map(self.audible, self.replies)):
            gap_s = max(0.0, onset_s - self._played_out_s)
            self.user_stats.add_gap(gap_s)
            self._tell_outlook(self._clock.now_s(), observed_gap_s=gap_s)
        self._played_out_s = None

    def speech_stopped(self) -> None:
        self._note("speech_stopped")

    def turn_committed(self) -> None:
        self._note("turn_committed")

    def held(self) -> None:
        self._note("held")

    def released(self) -> None:
        now_s = self._clock.now_s()
        for reply in self.replies:
            reply.playback.excuse_silence(now_s)
        self._note("released")

    # --- a response ---

    def response_created(self, response_id: str) -> Reply:
        now_s = self._clock.now_s()
        self._look(now_s)
        oldest_kept = len(self.replies) - _MAX_REPLIES + 1
        for n, reply in enumerate(self.replies):
            if reply.playback.over(now_s) or n < oldest_kept:
                self._retire(reply)
        self.replies = [reply for reply in self.replies if not reply.retired]
        queued_s = [r.playback.dry_at_s for r in self.replies if r.playback.sent_s]
        reply = Reply(
            response_id=response_id,
            playback=PlaybackClock(max(queued_s, default=float("-inf"))),
        )
        self.replies.append(reply)
        self._played_out_s = None
        self._note("response_created", reply)
        return reply

    def turn_began(self, reply: Reply) -> None:
        """The stages are asked for this reply; reports are about it from now on."""
        self._turn = reply
        self._tell(0.0, False, self._clock.now_s())

    def turn_ended(self, reply: Reply) -> None:
        if self._turn is reply:
            self._turn = None

    def generated(self, reply: Reply, duration_s: float) -> None:
        if reply.generated_s <= reply.playback.sent_s + _HELD_BACK_S:
            reply.unsent_since_s = self._clock.now_s()
        reply.generated_s += duration_s

    def sent(self, reply: Reply, duration_s: float) -> None:
        """The network took duration_s of its audio."""
        now_s, playback = self._clock.now_s(), reply.playback
        begins = not playback.sent_s
        if begins:
            self._note("first_audio", reply)
        silent_s, n_underruns = playback.underrun_s, playback.underruns
        dry_at_s = playback.dry_at_s if not begins else now_s
        playback.sent(duration_s, now_s)
        self._metrics.audio_sent_s.inc(duration_s)
        if playback.underruns > n_underruns:
            silent_s = playback.underrun_s - silent_s
            self._metrics.underruns.inc()
            self._metrics.underrun_s.inc(silent_s)
            # What was there and did not leave is the network's: others are not served worse.
            self._session.report_underrun(min(silent_s, max(0.0, reply.unsent_since_s - dry_at_s)))
            self._note("underrun", reply, silent_s=silent_s)
        if now_s - reply.logged_s >= _SENT_EVERY_S:
            self._note_sent(reply, now_s)
        if begins:
            self._tell_outlook(now_s)
        self._refresh(now_s)

    def all_sent(self, reply: Reply) -> None:
        """No more audio will be sent for it."""
        if reply.playback.finished:
            return
        now_s = self._clock.now_s()
        reply.playback.finish(now_s)
        if reply.playback.sent_s:
            self._note_sent(reply, now_s)
        self._look_ahead(now_s, REPORT_TOLERANCE_S)
        self._refresh(now_s)

    def response_done(self, reply: Reply, status: str) -> None:
        self._note("response_done", reply, status=status)

    def learned(
        self,
        reply: Reply,
        *,
        n_tokens: int,
        n_frames: int,
        spoken: bool,
        marks: dict[str, float] | None = None,
    ) -> None:
        """The turn has ended, so it is known how much text and audio it made.

        marks: seconds since it began, by name (telemetry/trace.py).
        """
        if spoken:
            self.user_stats.add_pace(n_tokens=n_tokens, n_frames=n_frames)
        facts = {"marks": {name: round(at_s, 3) for name, at_s in marks.items()}} if marks else {}
        self._note("learned", reply, n_tokens=n_tokens, n_frames=n_frames, spoken=spoken, **facts)

    def _stream(self, stage: str, what: str, buffered_s: float) -> None:
        self._note("stream", self._turn, stage=stage, what=what, buffered_s=buffered_s)

    # --- what became of it ---

    def audible(self, reply: Reply) -> bool:
        """Some of it has reached the listener, who is not through with it."""
        return reply.playback.sent_s > 0 and not reply.playback.over(self._clock.now_s())

    def over(self, reply: Reply) -> bool:
        """Nothing of it will be heard from now on."""
        return reply.playback.over(self._clock.now_s())

    def stopped(self, reply: Reply, *, barge_in: bool) -> float:
        """Playback ends here. Returns the seconds that were heard."""
        now_s = self._clock.now_s()
        if self.audible(reply):
            self.user_stats.add_response(interrupted=True)
        reply.was_over = True
        heard_s = reply.playback.stop(now_s)
        self._note(
            "barge_in" if barge_in else "stopped",
            reply,
            heard_s=heard_s,
            sent_s=reply.playback.sent_s,
            generated_s=reply.generated_s,
        )
        self._look_ahead(now_s, REPORT_TOLERANCE_S)
        self._refresh(now_s)
        return heard_s

    def acked(self, reply: Reply, position_s: float) -> float:
        """The client says it has played up to position_s. Returns the seconds heard."""
        now_s = self._clock.now_s()
        outcome = reply.playback.ack(position_s, now_s)
        self._metrics.acks.labels(outcome).inc()
        heard_s = reply.playback.heard_s(now_s)
        self._note("ack", reply, position_s=position_s, outcome=outcome, heard_s=heard_s)
        self._refresh(now_s)
        return heard_s

    def truncated(self, reply: Reply, position_s: float) -> None:
        """The client cut it at position_s."""
        now_s = self._clock.now_s()
        self._note("truncated", reply, position_s=position_s)
        # While more audio comes, a listener may go on after a cut; stages must not wait for ever.
        if reply.playback.finished or reply.playback.stopped:
            reply.was_over = True
            reply.playback.correct(position_s, now_s)
            self._look_ahead(now_s, REPORT_TOLERANCE_S)
        self._refresh(now_s)

    def close(self) -> None:
        """The session is over: no more timers, and the last figures."""
        if self._watcher:
            self._watcher.cancel()
            self._watcher = None
        for reply in self.replies:
            self._retire(reply)
        self.replies = []

    # --- inside ---

    def _refresh(self, now_s: float) -> None:
        self._look(now_s)
        self._look_ahead(now_s, OUTLOOK_TOLERANCE_S)
        due_s = self._next_change_s(now_s)
        if due_s is None or (self._watcher and self._wakes_s <= due_s):
            return
        if self._watcher:
            self._watcher.cancel()
        self._wakes_s = due_s
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Wake when playback must have changed, as long as it can change by itself."""
        while True:
            now_s = self._clock.now_s()
            due_s = self._next_change_s(now_s)
            if due_s is None:
                self._watcher = None
                return
            self._wakes_s = due_s
            await self._clock.sleep(due_s - now_s)
            self._look(self._clock.now_s())

    def _next_change_s(self, now_s: float) -> float | None:
        changes = (reply.playback.next_change_s(now_s) for reply in self.replies)
        return min((at_s for at_s in changes if at_s is not None), default=None)

    def _look(self, now_s: float) -> None:
        """Compare what is with what was known, and tell who has to know."""
        for reply in self.replies:
            playback = reply.playback
            n_timeouts = playback.ack_timeouts
            playback.check(now_s)
            if playback.ack_timeouts > n_timeouts:
                self._metrics.ack_timeouts.inc()
                self._note("ack_timeout", reply)
            heard_s, playing = playback.heard_s(now_s), playback.playing(now_s)
            if playing != reply.was_playing:
                reply.was_playing = playing
                self._note("playing" if playing else "dry", reply, heard_s=heard_s)
            if not reply.was_over and playback.over(now_s):
                reply.was_over = True
                if playback.sent_s:
                    self.user_stats.add_response(interrupted=False)
                    self._played_out_s = playback.dry_at_s
            if reply is self._turn:
                off_s = abs(self._told.heard_by(now_s) - heard_s)
                if playing != self._told.playing or off_s > REPORT_TOLERANCE_S:
                    self._tell(heard_s, playing, now_s)

    def _tell(self, heard_s: float, playing: bool, now_s: float) -> None:
        self._told = _Told(heard_s, playing, now_s)
        self._session.report_playback(heard_s, playing, self.user_stats.interrupts)

    def _look_ahead(self, now_s: float, tolerance_s: float) -> None:
        """Tell when playback will end, unless that is what the stages expect."""
        expected_s = max(0.0, self._told_end_s - now_s)
        if abs(self._plays_for_s(now_s) - expected_s) > tolerance_s:
            self._tell_outlook(now_s)

    def _tell_outlook(self, now_s: float, observed_gap_s: float | None = None) -> None:
        buffered_s = self._plays_for_s(now_s)
        self._told_end_s = now_s + buffered_s
        self._session.report_next_use(buffered_s, self.user_stats.response_gap_s, observed_gap_s)

    def _plays_for_s(self, now_s: float) -> float:
        """Replies queue up: a listener has one ear."""
        playbacks = [reply.playback for reply in self.replies if not reply.playback.stopped]
        return sum((p.sent_s - p.heard_s(now_s) for p in playbacks), 0.0)

    def _retire(self, reply: Reply) -> None:
        reply.retired = True
        heard_s = reply.playback.heard_s(self._clock.now_s())
        self._metrics.audio_heard_s.inc(heard_s)
        self._metrics.audio_unheard_s.inc(reply.playback.sent_s - heard_s)

    def _note_sent(self, reply: Reply, now_s: float) -> None:
        reply.logged_s = now_s
        self._note(
            "sent",
            reply,
            sent_s=reply.playback.sent_s,
            heard_s=reply.playback.heard_s(now_s),
            generated_s=reply.generated_s,
        )

    def _note(self, event: str, reply: Reply | None = None, **facts: Any) -> None:
        if reply:
            facts = {"response": reply.response_id, **facts}
        self.timeline.add(event, self._clock.now_s(), **facts)
