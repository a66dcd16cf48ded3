"""Users as events: they speak a clip, listen, wait, and speak again.

Plans and records are those of voice_load, so that its statistics and tables apply.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from sglang_live.errors import LiveError
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.load.arrivals import PlannedTurn, UserPlan
from sglang_live.extensions.planner.simulation.load.rows import TurnRow
from sglang_live.extensions.planner.simulation.server.listening import Listening
from sglang_live.extensions.planner.simulation.server.server import Session
from sglang_live.extensions.planner.simulation.server.turn_spec import TurnSpec
from sglang_live.extensions.planner.simulation.turn_record import BARGE_IN, MS_PER_S, TurnRecord
from sglang_live.extensions.planner.simulation.workload import NEW, Clip, History

# Voice that starts a turn (min_speech_ms of interaction/vad.py).
_STARTED_S = 0.096
# Silence that ends a turn (silence_duration_ms), and how late a window of 32 ms tells of any.
_SILENCE_S, _NOTICED_S = 0.5, 0.05
# Multiples of it are spread evenly modulo 1, however many they are.
_GOLDEN = 0.618034


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSettings:
    """
    barge_in_s: from the onset of the user's voice until playback stops; median of the runs of
        benchmark/results/voice_load/cpu_2026-11-24_barge_in.json.
    frames_per_token: codec frames for each token of the thinker.
    reply_scale: factor of the drawn durations of responses.
    timeout_s: time that a turn may take beyond the user's speech.
    returns: whether a user who was refused tries again, with the next turn.
    acks: whether clients report what they have played.
    longest: history of a session at its end. Users begin in the middle of theirs: at parts of it
        that are spread evenly.
    """

    barge_in_s: float = 0.263
    frames_per_token: float = 1.0
    reply_scale: float = 1.0
    timeout_s: float = 60.0
    returns: bool = True
    acks: bool = False
    longest: History = NEW

    def history_of(self, user: int) -> History:
        part = user * _GOLDEN % 1.0
        longest = self.longest
        return replace(
            longest, n_tokens=round(part * longest.n_tokens), n_user=round(part * longest.n_user)
        )


@dataclass(eq=False, slots=True)
class _Spoken:
    """A turn that was begun. Times are those of the simulation."""

    planned: PlannedTurn
    start_s: float
    clip: Clip
    end_s: float | None = None
    stopped_s: float | None = None
    barged_s: float | None = None
    onset_s: float | None = None
    status: str | None = None
    listening: Listening | None = None

    @property
    def finished_s(self) -> float:
        return self.start_s + self.clip.end_s


class Service(Protocol):
    """What users speak to: a server, or several."""

    @property
    def events(self) -> Events: ...

    def open(self, session_id: str, history: History = NEW) -> Session:
        """Raises LiveError if there is no room."""
        ...

    def close(self, session: Session) -> None: ...

    def take_turn(
        self, session: Session, spec: TurnSpec, changed: Callable[[], None]
    ) -> Listening: ...

    def interrupt(self, session: Session) -> None: ...

    def vanish(self, session: Session, noticed_s: float) -> None: ...

    def speech_started(self, session: Session, end_s: float) -> None: ...

    @property
    def speculate_s(self) -> float | None: ...

    def paused(self, session: Session, spec: TurnSpec, said_s: float) -> None: ...

    def resumed(self, session: Session) -> None: ...


class User:
    """
    rows: of all turns, once the simulation is over. played_out_s: end of the latest playback.
    plan: what it was to do. is_gone: its client has vanished.
    """

    def __init__(
        self, plan: UserPlan, clips: Mapping[str, Clip], server: Service, settings: UserSettings
    ):
        self.plan = plan
        self._clips = clips
        self._server = server
        self._settings = settings
        self._events = server.events
        self._session: Session | None = None
        self._n_sessions = 0
        self._history = settings.history_of(plan.user)
        self._turns: list[_Spoken] = []
        self.played_out_s = 0.0
        self.is_gone = False
        self._at(plan.start_s, self._speak)

    def vanish(self, noticed_s: float) -> None:
        """Its client is gone without a word, which the server notices after a while."""
        if self._session is not None and not self.is_gone:
            self.is_gone = True
            self._server.vanish(self._session, noticed_s)

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        """What the user will do, if the client is there then."""
        self._events.at(time_s, lambda: None if self.is_gone else act())

    @property
    def heard(self) -> list[Listening]:
        """What it has of the responses, those that were cancelled included."""
        return [turn.listening for turn in self._turns if turn.listening is not None]

    @property
    def rows(self) -> list[TurnRow]:
        return [self._row(number, turn) for number, turn in enumerate(self._turns)]

    @property
    def present_s(self) -> tuple[float, float]:
        """When the user came and left."""
        ends_s = [turn.end_s for turn in self._turns if turn.end_s is not None]
        return self.plan.start_s, max([self.plan.start_s, self.played_out_s, *ends_s])

    @property
    def has_left(self) -> bool:
        all_begun = len(self._turns) == len(self.plan.turns)
        return self.is_gone or (all_begun and self._turns[-1].status is not None)

    # --- a turn ---

    def _speak(self, interrupted: _Spoken | None = None) -> None:
        planned = self.plan.turns[len(self._turns)]
        turn = _Spoken(planned, self._events.now_s(), self._clips[planned.clip])
        self._turns.append(turn)
        if self._session is None:
            self._n_sessions += 1
            try:
                self._session = self._server.open(
                    f"{self.plan.user:04d}-{self._n_sessions}", self._history
                )
                self._session.acks = self._settings.acks
            except LiveError:
                turn.status = "refused"
                turn.end_s = turn.start_s
                if self._settings.returns:
                    self._over(turn, planned.response_gap_s)
                return
        if interrupted is not None:
            onset_s = turn.start_s + turn.clip.onset_s
            interrupted.onset_s = onset_s
            stop_s = onset_s + self._settings.barge_in_s
            self._at(stop_s, lambda: self._stop(interrupted))
        known_s = turn.finished_s + turn.clip.end_known_s
        started_s = turn.start_s + turn.clip.onset_s + _STARTED_S
        self._at(started_s, lambda: self._speech_started(known_s))
        self._pause(turn, known_s)
        self._at(known_s, lambda: self._end_of_turn(turn))
        limit_s = turn.start_s + turn.clip.duration_s + self._settings.timeout_s
        self._at(limit_s, lambda: self._time_out(turn))

    def _speech_started(self, known_s: float) -> None:
        if self._session is not None:
            self._server.speech_started(self._session, known_s)

    def _pause(self, turn: _Spoken, known_s: float) -> None:
        """What the server hears of pauses; the last one ends the turn."""
        silent_s = self._server.speculate_s
        if silent_s is None:
            return
        onset_s = turn.start_s + turn.clip.onset_s
        for begin_s, length_s in turn.planned.pauses_s:
            noticed_s = onset_s + begin_s + _NOTICED_S
            said_s = turn.clip.onset_s + begin_s + silent_s
            if length_s > silent_s:
                self._at(noticed_s + silent_s, partial(self._paused, turn, said_s))
                self._at(noticed_s + length_s, self._resumed)
        paused_s = max(turn.finished_s, known_s - (_SILENCE_S - silent_s))
        self._at(paused_s, partial(self._paused, turn, turn.clip.duration_s))

    def _paused(self, turn: _Spoken, said_s: float) -> None:
        if self._session is not None:
            self._server.paused(self._session, self._spec(turn), said_s)

    def _resumed(self) -> None:
        if self._session is not None:
            self._server.resumed(self._session)

    def _end_of_turn(self, turn: _Spoken) -> None:
        assert self._session is not None
        turn.stopped_s = self._events.now_s()
        spec = self._spec(turn)
        turn.listening = self._server.take_turn(self._session, spec, lambda: self._changed(turn))

    def _spec(self, turn: _Spoken) -> TurnSpec:
        n_tokens = turn.planned.response_tokens
        assert n_tokens is not None, "lengths of responses are drawn before the run"
        n_frames = n_tokens + 1
        if self._settings.frames_per_token != 1.0:
            n_frames, n_tokens = n_tokens, max(1, round(n_tokens / self._settings.frames_per_token))
        return TurnSpec(audio_s=turn.clip.duration_s, n_tokens=n_tokens, n_frames=n_frames)

    def _changed(self, turn: _Spoken) -> None:
        """The first packet has come, or the end of the response."""
        listening, now_s = turn.listening, self._events.now_s()
        if (
            self.is_gone
            or turn.barged_s is not None
            or turn.status is not None
            or listening is None
        ):
            return
        if listening.done_s is None:
            planned = turn.planned.interruption
            if planned is not None and planned.kind == BARGE_IN:
                self._at(now_s + planned.after_s, lambda: self._barge_in(turn))
            return
        turn.end_s = now_s
        played_s = now_s + max(0.0, listening.playback.buffered_s)
        self._at(played_s, lambda: self._played_out(turn))

    def _barge_in(self, turn: _Spoken) -> None:
        listening = turn.listening
        if turn.status is not None or listening is None or not listening.is_playing:
            return
        turn.barged_s = turn.end_s = self._events.now_s()
        self._speak(interrupted=turn)

    def _stop(self, turn: _Spoken) -> None:
        """The server has detected the user's voice over the response of `turn`."""
        assert turn.listening is not None
        if turn.listening.is_playing:
            turn.listening.flush()
        if self._session is not None:
            self._server.interrupt(self._session)

    def _played_out(self, turn: _Spoken) -> None:
        if turn.barged_s is not None or turn.status is not None:
            return
        assert turn.listening is not None
        turn.status = turn.listening.status
        self.played_out_s = self._events.now_s()
        self._over(turn, turn.planned.response_gap_s)

    def _time_out(self, turn: _Spoken) -> None:
        is_barged = turn.barged_s is not None
        if turn.end_s is not None or turn.status is not None or is_barged:
            return
        turn.status = "timeout"
        if self._session is not None:
            self._server.close(self._session)
            self._session = None
        self._over(turn, 0.0)

    def _over(self, turn: _Spoken, gap_s: float) -> None:
        turn.end_s = self._events.now_s() if turn.end_s is None else turn.end_s
        if len(self._turns) < len(self.plan.turns):
            self._at(self._events.now_s() + gap_s, self._speak)
        elif self._session is not None:
            self._server.close(self._session)
            self._session = None

    # --- its record ---

    def _row(self, number: int, turn: _Spoken) -> TurnRow:
        return TurnRow(
            user=self.plan.user,
            turn=number,
            clip=turn.planned.clip,
            response_gap_s=turn.planned.response_gap_s,
            start_s=turn.start_s,
            end_s=self._events.now_s() if turn.end_s is None else turn.end_s,
            record=self._record(turn),
            planned=turn.planned.interruption,
        )

    def _record(self, turn: _Spoken) -> TurnRecord:
        def since(at_s: float | None, begin_s: float | None = turn.finished_s) -> float | None:
            return None if at_s is None or begin_s is None else MS_PER_S * (at_s - begin_s)

        heard = turn.listening
        status = turn.status or (heard.status if heard is not None else None) or "unstopped"
        if heard is None:
            return TurnRecord(
                kind="speech",
                status=status,
                user_audio_s=turn.clip.duration_s,
                end_of_turn_ms=since(turn.stopped_s),
            )
        barged = turn.barged_s is not None
        over_before = heard.done_s is not None and (heard.done_s < (turn.onset_s or 0.0))
        stop_ms = since(heard.last_s, turn.onset_s)
        playback = heard.playback
        return TurnRecord(
            kind="speech",
            status=status,
            user_audio_s=turn.clip.duration_s,
            ttfp_ms=since(heard.first_s),
            end_of_turn_ms=since(turn.stopped_s),
            audio_s=playback.received_s,
            audio_packets=heard.packets,
            generation_s=None if heard.last_s is None else heard.last_s - heard.created_s,
            heard_s=heard.heard_s,
            heard_in_all_s=heard.heard_s,
            chunks_due=playback.chunks_due,
            chunks_on_time=playback.chunks_on_time,
            gaps_ms=tuple(MS_PER_S * gap_s for gap_s in playback.gaps_s),
            gaps_over_100ms=playback.audible_gaps,
            interruption=BARGE_IN if barged else None,
            truncated_ms=since(turn.barged_s, heard.first_s),
            cut_short=status == "cancelled" or heard.flushed_s is not None,
            stop_latency_ms=None if over_before or stop_ms is None else max(0.0, stop_ms),
            silence_ms=since(heard.flushed_s, turn.onset_s),
        )
