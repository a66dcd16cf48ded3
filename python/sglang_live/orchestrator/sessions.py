"""Sessions of the orchestrator. Each stays with one replica of every stage while that is up."""

import logging
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import numpy as np

from sglang_live.aio import close_all
from sglang_live.capacity.best_effort import BestEffort, used_share
from sglang_live.capacity.control import Capacity, CapacityControl, Pool
from sglang_live.clock import Clock
from sglang_live.core import (
    AudioDelta,
    BegunTurn,
    HistoryItem,
    PromptContent,
    PromptSize,
    TranscriptDelta,
    TurnDone,
    TurnEvent,
    TurnRequest,
)
from sglang_live.errors import BadInputError, LiveError, StageUnavailableError
from sglang_live.kv.retention import RetentionConfig
from sglang_live.messages import PROMPT_TOKENS_MOST, NextUseHint, UserSpeaking
from sglang_live.orchestrator.duplex import DuplexCall, DuplexSettings
from sglang_live.orchestrator.metronome import Metronome
from sglang_live.orchestrator.moves import LostJobs, TurnMove
from sglang_live.orchestrator.replica_choice import least_loaded
from sglang_live.orchestrator.speculation import SessionSpeculation, Speculations, TurnWork
from sglang_live.orchestrator.stage_jobs import OnStreamEvent, seed_of
from sglang_live.orchestrator.stage_links import (
    StageLinks,
    make_voice,
    measure_prompt,
    retain_native,
)
from sglang_live.orchestrator.startup_delay import StartupDelays
from sglang_live.orchestrator.suspects import SuspectError, Suspects, TurnContent
from sglang_live.orchestrator.turn import run_turn
from sglang_live.orchestrator.turn_control import TurnControl
from sglang_live.orchestrator.turn_deadline import TurnDeadline
from sglang_live.orchestrator.turn_prefill import TurnPrefill
from sglang_live.policy.policies import OFF, Policies
from sglang_live.policy.speculation import Refusal
from sglang_live.stages.spec import STAGES
from sglang_live.stages.supervisor import Replica, Supervisor
from sglang_live.telemetry.log_context import set_log_ids
from sglang_live.telemetry.trace import TurnTrace

log = logging.getLogger(__name__)

# Of a session that may go on at another server.
FIRST_EPOCH = 1


class VoiceSession:
    """One user's session: it stays with one replica of every stage, and keeps its KV between
    turns. Methods that are not coroutines never block.

    epoch: how often the session was begun or has gone on at another server. The stages give it to
        the server with the highest one. 0: it ends with this server.
    """

    def __init__(
        self,
        owner: "Orchestrator",
        session_id: str,
        replicas: dict[str, Replica],
        admitted: bool = True,
        epoch: int = 0,
    ):
        self.session_id = session_id
        self.admitted = admitted
        self.owner = owner
        self.epoch = epoch
        self.links = owner.links(replicas, session_id, epoch)
        self.turn_prefill = TurnPrefill(self.links.thinker, owner.suspects)
        self.speculation = SessionSpeculation(owner.speculations)
        self.on_stream_event: OnStreamEvent | None = None
        self.content = TurnContent()
        self._replicas = replicas
        self._closed = False
        self._latest: _ConversationTurn | None = None
        self._n_turns = 0

    @property
    def n_turns(self) -> int:
        """Turns so far, whose numbers are in ids and keys of items."""
        return self._n_turns

    @property
    def addresses(self) -> dict[str, str]:
        """Of its replicas, by stage."""
        return {stage: replica.spec.address for stage, replica in self._replicas.items()}

    def begun(self) -> BegunTurn | None:
        """What has come of the conversation's latest turn: another server goes on behind it."""
        if (latest := self._latest) is None:
            return None
        return latest.control.begun(seed_of(latest.turn))

    def restore(self, history: Iterable[HistoryItem], n_turns: int) -> None:
        """Go on with the session of another server. history: of which the stages may have KV."""
        self._n_turns = n_turns
        self.links.expect(history)

    async def respond(self, turn: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """Run one turn. Ends with TurnDone, or raises LiveError.

        Closing the iterator early cancels the turn in every stage; the session stays usable.
        At most one turn that is not `stateless` may run at a time.
        """
        if self._closed:
            raise BadInputError(f"session {self.session_id} is closed")
        if self._busy and not turn.stateless:
            raise BadInputError(f"session {self.session_id} runs a turn already")
        turn = self._numbered(turn)
        set_log_ids(session=self.session_id, turn=turn.turn_id)
        run: _StatelessTurn
        if turn.stateless:
            run = _StatelessTurn(self, turn, self.owner.links(self._replicas, ""), TurnWork(turn))
        else:
            run = _ConversationTurn(self, turn)
            self._latest = run
        try:
            async with aclosing(run.events()) as events:
                async for event in events:
                    yield event
        except BadInputError:
            raise
        except LiveError:
            run.deadline.failed()
            raise
        finally:
            run.over()

    def duplex(
        self, voice: str, role: str, temperature: float | None, window_frames: int | None
    ) -> DuplexCall:
        """A call with a model that hears while it speaks; it begins with its run()."""
        self._n_turns += 1
        name = f"{self.session_id}.{self._n_turns:08}"
        settings = DuplexSettings(
            frame_s=self.owner.duplex_s,
            voice=voice,
            role=role,
            temperature=temperature,
            seed=int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little"),
            window_frames=window_frames,
        )
        owner = self.owner
        owner.capacity.turn_begins(self.session_id)
        deadlines = _FrameDeadlines(owner.capacity, self.session_id, owner.duplex_s)
        place = partial(self.place, self.links)
        return DuplexCall(
            name, self.links, settings, owner.clock, owner.metronome, deadlines, place
        )

    def place(self, links: StageLinks, *, if_lost: bool = False) -> None:
        """Find another replica in the place of each that is down or drains, if there is one, for
        the session and for later jobs over `links`.

        It builds the session anew from the history.

        Args:
            if_lost: not of one that drains, because jobs of the session may run in it.
        """
        for stage, replica in self._replicas.items():
            leaves = not replica.is_up or (replica.drains and not if_lost)
            if leaves and (other := self.owner.other_than(replica)) is not None:
                self._replicas[stage] = other
                replica.sessions.discard(self.session_id)
                replica.n_left += 1
                other.sessions.add(self.session_id)
                log.warning(
                    "session_placed session=%s from=%s to=%s",
                    self.session_id,
                    replica.name,
                    other.name,
                )
        links.to_replicas(self._replicas, if_lost=if_lost)

    def _numbered(self, turn: TurnRequest) -> TurnRequest:
        if turn.turn_id:
            return turn
        self._n_turns += 1
        # Of one length: SGLang aborts requests by the beginning of their ids.
        return replace(turn, turn_id=f"{self.session_id}.{self._n_turns:08}")

    @property
    def _busy(self) -> bool:
        return self._latest is not None and not self._latest.is_over

    @property
    def _running(self) -> "_ConversationTurn | None":
        """The conversation's turn, until its last event."""
        return self._latest if self._latest is not None and not self._latest.is_done else None

    def watch(self, on_stream_event: OnStreamEvent) -> None:
        """Report what the stages' policies do with the requests of the running turn.

        Args:
            on_stream_event: called with the stage; with "u0", "u1", "u2" or "unknown", the new
                urgency class of its request, or with "paused" or "resumed"; and with the seconds of
                speech by which it was ahead of its consumer.
        """
        self.on_stream_event = on_stream_event

    def interrupt(self) -> bool:
        """End the running turn early; its iterator soon yields TurnDone("interrupted").

        The session keeps the KV of what was generated. Returns False if no such turn runs, or if
        the server runs without that policy: then the iterator has to be closed instead.
        """
        running = self._running
        if running is None or not running.control.can_interrupt:
            return False
        if not running.control.interrupted:
            log.info("turn_interrupted turn=%s", running.turn.turn_id)
            running.control.interrupt()
        running.deadline.withdrawn()
        return True

    def speculation_refused(self) -> Refusal:
        """Why a speculative turn may not begin now; "" if it may."""
        works = (session.speculation.work for session in self.owner.sessions)
        running = [work for work in works if work is not None]
        return self.owner.speculations.refusal(self.speculation, running)

    def end_speculation(self, *, confirmed: bool) -> None:
        """Report, once, that the latest speculative turn has become the response, or never will.
        No effect on a turn that is not speculative. It may still run, or have ended."""
        work = self.speculation.end(confirmed=confirmed)
        if work is not None and confirmed:
            assert self._latest is not None, "it is speculative"
            self._latest.deadline.confirm()
            if work.complete:
                self.turn_prefill.answered()

    def report_playback(self, heard_s: float, playing: bool, speed: float = 1.0) -> None:
        """Report how far the playback of the running turn is.

        Args:
            heard_s: seconds of its audio, as the stages make it, that were heard.
            playing: whether playback advances by itself. Between two reports the stages assume
                that it then does so by `speed` seconds per second.
        """
        if self._latest is not None:
            self._latest.work.heard(heard_s, playing, self.owner.clock.now_s(), speed)
        if self._running is not None:
            self._running.control.heard(heard_s, playing, speed)

    def report_underrun(self, silent_s: float) -> None:
        """Report a gap of silent_s within a response, caused by stages that were late."""
        if self._latest is not None:
            self._latest.deadline.gap(silent_s)

    def prefill_turn(self, turn: TurnRequest) -> bool:
        """Prefill the utterance so far in the background, while the user still speaks; with
        `preheat` the history alone, if its KV is lost.

        Requests with a deadline go first. The next turn waits for its end.

        Returns:
            False if a turn or another turn prefill runs, or if the thinker of a preheat is down.
        """
        if self._closed or self._busy:
            return False
        self.place(self.links, if_lost=self.turn_prefill.runs)
        if turn.preheat and not self._replicas["thinker"].is_up:
            return False  # its KV is lost; it may be up again while the user still speaks
        try:
            turn = self._numbered(turn)
            content = self.content.of(turn)
            self.owner.suspects.check(content)
        except SuspectError:
            return False  # its turn is refused, with the reason
        return self.turn_prefill.prefill_turn(turn, content)

    def join_frames(self, frame_s: float) -> float:
        """Begin frame mode with a frame every frame_s.

        Returns:
            The duration of the first frame, chosen so that the frames of all sessions are spread.
        """
        return self.owner.metronome.join(self.session_id, frame_s)

    def leave_frames(self) -> None:
        """End frame mode. Without it, nothing happens."""
        self.owner.metronome.leave(self.session_id)

    def report_speech(self, speaks: bool = True) -> None:
        """The user has begun to speak. Not speaks: what seemed to be speech was none."""
        if self.owner.policies:
            self.links.thinker.hint(UserSpeaking(self.session_id, speaks))

    def report_next_use(
        self, to_play_s: float, response_gap_s: float | None, observed_gap_s: float | None
    ) -> None:
        """Report when the user will speak again, as far as known: see messages.NextUseHint."""
        if self.owner.policies.next_use:
            self.links.thinker.hint(
                NextUseHint(self.session_id, to_play_s, response_gap_s, observed_gap_s)
            )

    async def close(self) -> None:
        """Free everything that the session holds in any stage. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await close_all(
            self.leave_frames,
            self.turn_prefill.close,
            partial(self.speculation.end, confirmed=False),
            self.links.close,
            partial(self.owner.release, self),
        )


@dataclass(frozen=True, slots=True)
class _FrameDeadlines:
    """Of a call: each frame of its user has a period, behind which the next one comes."""

    capacity: CapacityControl
    session_id: str
    frame_s: float

    def begin(self) -> int:
        # Admission gives half of it to a frame behind which text has still to be written.
        return self.capacity.frame_due(self.session_id, 2 * self.frame_s)

    def came(self, deadline: int) -> None:
        self.capacity.came(deadline)

    def failed(self, deadline: int) -> None:
        self.capacity.failed(deadline)

    def abandoned(self, deadline: int) -> None:
        self.capacity.abandoned(deadline)


class _StatelessTurn:
    """A turn that leaves nothing in its session.

    deadline: as admission counts it. control: interrupts it. work: what it has made.
    """

    def __init__(
        self,
        session: VoiceSession,
        turn: TurnRequest,
        links: StageLinks,
        work: TurnWork,
        on_stream_event: OnStreamEvent | None = None,
    ):
        owner = session.owner
        self.session = session
        self.turn = turn
        self.links = links
        self.work = work
        self.deadline = TurnDeadline(owner.capacity, session.session_id, turn)
        self.control = TurnControl(
            owner.policies,
            owner.clock,
            on_stream_event,
            self.deadline.call_came,
        )
        self._trace = TurnTrace(owner.clock)

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        turn, owner = self.turn, self.session.owner
        if turn.frame_s is None:
            log.info("turn_started turn=%s stateless=%s", turn.turn_id, turn.stateless)
        await self._wait_for_session()
        if turn.frame_s is not None:
            await owner.metronome.tick(owner.clock.now_s() + turn.frame_s)
        self.session.place(self.links)
        content = self.session.content.of(turn)
        move = TurnMove(
            turn.turn_id,
            place=partial(self.session.place, self.links, if_lost=True),
            check=partial(owner.suspects.check, content),
            lost_jobs=owner.lost_jobs,
        )
        with owner.suspects.turn(turn.turn_id, content):
            events = run_turn(turn, self.links, self._trace, self.control, move)
            async with aclosing(events):
                async for event in events:
                    self._note(event)
                    yield self._completed(event) if isinstance(event, TurnDone) else event

    async def _wait_for_session(self) -> None:
        """Return when the turn may begin."""

    def _note(self, event: TurnEvent) -> None:
        self.work.made(event)
        if isinstance(event, AudioDelta):
            self.deadline.audio_came()
        elif isinstance(event, TranscriptDelta) and event.text.strip():
            self.deadline.text_came()
        elif isinstance(event, TurnDone) and self.turn.frame_s is not None:
            self.deadline.frame_done()
        elif isinstance(event, TurnDone):
            self.deadline.done()
            marks = self._trace.marks.items()
            times = " ".join(f"{name}={1000 * at_s:.0f}ms" for name, at_s in marks)
            log.info("turn_done turn=%s status=%s %s", self.turn.turn_id, event.status, times)

    def _completed(self, done: TurnDone) -> TurnDone:
        """The turn's last event, as the session passes it on."""
        return done

    def over(self) -> None:
        """The turn has ended, with or without its last event."""
        self.deadline.over()


class _ConversationTurn(_StatelessTurn):
    """A turn of the session's conversation. is_done: its last event has come."""

    def __init__(self, session: VoiceSession, turn: TurnRequest):
        work = session.speculation.begin(turn)
        super().__init__(session, turn, session.links, work, session.on_stream_event)
        self.is_done = False
        self.is_over = False

    async def _wait_for_session(self) -> None:
        await self.session.turn_prefill.finish()

    def _completed(self, done: TurnDone) -> TurnDone:
        self.is_done = True
        prefill = self.session.turn_prefill
        done = prefill.with_usage(done, self.turn)
        if not self.session.speculation.is_open:
            prefill.answered()
        return done

    def over(self) -> None:
        super().over()
        self.is_done = True
        self.is_over = True
        self.session.speculation.over(self.work)
        self.links.forget_deleted(self.turn)


class Orchestrator:
    def __init__(
        self,
        supervisor: Supervisor,
        *,
        model_name: str,
        voices: tuple[str, ...],
        capacity: CapacityControl,
        policies: Policies = OFF,
        clock: Clock,
        suspects: Suspects | None = None,
        talker_reads_text: bool = False,
        duplex_s: float = 0.0,
        own_voice: bool = False,
    ):
        """talker_reads_text, duplex_s, own_voice: see ModelFacts."""
        self.suspects = suspects or Suspects(clock)
        self.model_name = model_name
        self.voices = voices
        self.clock = clock
        self.capacity = capacity
        self.policies = policies
        self.startup_delays = StartupDelays(clock) if policies.startup_delay else None
        self.metronome = Metronome(clock)
        self._supervisor = supervisor
        # Of the model: later, all replicas of a stage may be gone for a while.
        present = {replica.spec.stage for replica in supervisor.replicas}
        self._stages = [stage for stage in STAGES if stage in present]
        self._talker_reads_text = talker_reads_text
        self.own_voice = own_voice
        self.duplex_s = duplex_s
        self.speculations = Speculations(capacity, clock)
        self.lost_jobs = LostJobs()
        self._sessions: dict[str, VoiceSession] = {}

    @property
    def sessions(self) -> Collection[VoiceSession]:
        return self._sessions.values()

    async def open_session(
        self,
        session_id: str,
        *,
        admitted: bool = True,
        epoch: int = 0,
        at: Mapping[str, str] | None = None,
    ) -> VoiceSession:
        """Open a session.

        Args:
            admitted: False: it does not count as a session, and is not refused when these are as
                many as can be served. The gateway bounds the number of such sessions.
            epoch: see VoiceSession.
            at: addresses of its replicas, by stage, that have KV of it; None: there are none.
        Raises:
            CapacityError: the server is full.
            StageUnavailableError: a stage is down.
        """
        if session_id in self._sessions:
            raise BadInputError(f"session {session_id} exists already")
        replicas = {stage: self._least_loaded(stage, stays=True) for stage in self._stages}
        for replica in self._supervisor.replicas:
            stage = replica.spec.stage
            if (
                replica.is_up
                and stage in replicas
                and replica.spec.address == (at or {}).get(stage)
            ):
                replicas[stage] = replica
        if admitted:
            self.capacity.admit(session_id)
        for replica in replicas.values():
            replica.sessions.add(session_id)
        session = VoiceSession(self, session_id, replicas, admitted, epoch)
        self._sessions[session_id] = session
        return session

    def links(self, replicas: dict[str, Replica], session_id: str, epoch: int = 0) -> StageLinks:
        return StageLinks.to(
            replicas,
            session_id,
            self.startup_delays,
            self._talker_reads_text,
            epoch,
            self.own_voice,
        )

    async def retain_native(self, session_id: str, retention: RetentionConfig) -> None:
        """Bound a streaming session that was opened over SGLang's own API.

        On return the bound holds: requests that are sent from now on run under it.

        Args:
            retention: with a number of sink tokens.
        Raises:
            StageUnavailableError, StageFailedError: it is not known whether the bound holds.
        """
        [replica] = [r for r in self._supervisor.replicas if r.spec.native_key]
        await retain_native(replica, session_id, retention)

    async def measure(self, content: PromptContent) -> PromptSize | None:
        """The length of a prompt with this content. None: so short that it fits in any case.

        Raises:
            StageUnavailableError, StageFailedError, DeadlineError: no thinker could count it.
        """
        if self.duplex_s:
            return None  # its talker counts the frames of a role
        # All thinkers have the same model; limits differ only on other hosts.
        replica = self._least_loaded("thinker")
        assert replica.ready is not None, "it is up"
        most_tokens = replica.ready.load.get(PROMPT_TOKENS_MOST, 0)
        # The other half is for markup, and for functions as the model's template writes them.
        if content.most_tokens <= most_tokens // 2:
            return None
        measured = await measure_prompt(replica, content)
        return PromptSize(
            header=measured.header_tokens,
            items=measured.item_tokens,
            most_header=measured.most_header_tokens,
            most=measured.most_tokens,
        )

    async def make_voice(self, samples: np.ndarray) -> bytes:
        """A voice of a recording, for TurnRequest.speaker.

        Args:
            samples: [n] float32 in [-1, 1], at the model's voice_rate_hz.
        Raises:
            StageUnavailableError, StageFailedError, DeadlineError: no talker could make it.
        """
        return await make_voice(self._least_loaded("talker"), samples)

    def other_than(self, replica: Replica) -> Replica | None:
        """A replica of the same stage that is up; None: none is, or is better than this one."""
        try:
            other = self._least_loaded(replica.spec.stage)
        except StageUnavailableError:
            return None
        return None if replica.is_up and other.drains else other

    def pools(self) -> dict[str, Pool]:
        """The KV pools of all engines that are up, by replica."""
        pools = {}
        for replica in self._supervisor.replicas:
            share = used_share(replica.ready.load) if replica.ready else None
            if share is not None:
                sessions = (self._sessions.get(session_id) for session_id in replica.sessions)
                n_sessions = sum(one is not None and one.admitted for one in sessions)
                stage = replica.spec.stage
                pools[replica.name] = Pool(stage=stage, share=share, n_sessions=n_sessions)
        return pools

    def capacity_now(self) -> Capacity:
        """How many more sessions may come."""
        return self.capacity.report()

    def best_effort_now(self) -> BestEffort | None:
        """What the engines say of best-effort work; None: nothing."""
        ready = (replica.ready for replica in self._supervisor.replicas)
        return BestEffort.of(one.load for one in ready if one is not None)

    def release(self, session: VoiceSession) -> None:
        if self._sessions.pop(session.session_id, None) is not None and session.admitted:
            self.capacity.release(session.session_id)
        for replica in self._supervisor.replicas:
            replica.sessions.discard(session.session_id)

    def _least_loaded(self, stage: str, *, stays: bool = False) -> Replica:
        """stays: not one that drains, which otherwise is better than none."""
        replicas = [r for r in self._supervisor.replicas if r.spec.stage == stage]
        staying = [r for r in replicas if not r.drains]
        if not stays and not any(r.is_up for r in staying):
            staying = replicas
        return least_loaded(stage, staying, self.capacity.has_room_in)
