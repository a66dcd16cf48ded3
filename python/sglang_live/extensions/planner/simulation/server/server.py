"""The simulated server: three stages on devices, and the way of a turn through them.

In: sessions, ends of utterances, interruptions. Out: audio packets and ends of responses, to the
turn's Listening. Times that the device model does not have are in HostTimes.
"""

import math
from collections.abc import Callable
from functools import partial

from sglang_live.capacity.control import CapacityConfig, CapacityControl, Pool
from sglang_live.extensions.planner.simulation.engine.engine import Consumer, Engine
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.server.posts import Frames, Posts, Tokens
from sglang_live.extensions.planner.simulation.server.replicas import Replicas
from sglang_live.extensions.planner.simulation.server.session import NEW, History, Session
from sglang_live.extensions.planner.simulation.server.startup import StartupDelays
from sglang_live.extensions.planner.simulation.server.thinking import Thinking
from sglang_live.extensions.planner.simulation.server.turn import Listening, Places, Turn, TurnSpec
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.interaction.user_stats import UserPrior, UserStats
from sglang_live.orchestrator.replica_choice import least_loaded
from sglang_live.policy.policies import Policies

_PACKET_S = 0.16


class Server:
    """
    Attributes:
        n_frames: codec frames that the talkers have made.
        posts: messages of others than the sessions here.
        sessions: open ones, with the replicas that they stay with.
        turns: the latest of each session.
    """

    def __init__(self, spec: ServerSpec, policies: Policies, events: Events):
        self.spec = spec
        self.policies = policies
        self.events = events
        self.host = spec.host
        consumers: tuple[Consumer, Consumer] = Tokens(self), Frames(self)
        self.replicas = Replicas(spec, policies, events, consumers)
        self.posts = Posts(events, spec.host, self.replicas)
        self._prior = UserPrior()
        self.sessions: dict[str, tuple[Session, Places]] = {}
        self._startup = StartupDelays(events) if policies.startup_delay else None
        self.capacity = CapacityControl(
            CapacityConfig(
                max_sessions=spec.max_sessions,
                adapts=policies.admission,
                admission_first_audio_ms=1000 * spec.first_audio_s,
            ),
            events,
            self._pools,
        )
        self.turns: dict[str, Turn] = {}  # by session, until its thinker's request has ended
        self._next: dict[str, Callable[[], None]] = {}
        self._n_turns = self.n_frames = 0

    def _pools(self) -> dict[str, Pool]:
        """As the server's process reads them."""
        pools = {}
        for replica in (*self.replicas.thinkers, *self.replicas.talkers):
            own, n = replica.engine.pool, len(replica.sessions)
            pools[replica.name] = Pool(stage=own.name, share=own.used / own.total, n_sessions=n)
        return pools

    @property
    def is_up(self) -> bool:
        """As /health, which a load balancer reads: whether every replica serves."""
        return all(replica.is_up for replica in self.replicas.every)

    # --- sessions ---

    def open(self, session_id: str, history: History = NEW) -> Session:
        """Raises LiveError if the server has no room, or no replica of a stage is up."""
        has_room = self.capacity.has_room_in
        places = Places(
            thinker=least_loaded("thinker", self.replicas.thinkers, has_room),
            talker=least_loaded("talker", self.replicas.talkers, has_room),
            vocoder=least_loaded("vocoder", self.replicas.vocoders),
        )
        self.capacity.admit(session_id)
        for replica in places.every:
            replica.sessions.add(session_id)
        session = Session(session_id, UserStats(self._prior))
        self.sessions[session_id] = session, places
        if history.n_tokens:
            places.thinker.kv.resume(session, history)
        return session

    def close(self, session: Session) -> None:
        if session.is_closed:
            return
        self.interrupt(session)
        self._next.pop(session.session_id, None)
        session.is_closed = True
        _, places = self.sessions.pop(session.session_id)
        for replica in places.every:
            replica.sessions.discard(session.session_id)
        turn = self.turns.get(session.session_id)
        if turn is None or turn.thinker_ended:
            places.thinker.kv.close(session)
        self.capacity.release(session.session_id)

    # --- turns ---

    def take_turn(self, session: Session, spec: TurnSpec, changed: Callable[[], None]) -> Listening:
        """The user's turn is over: respond. Waits for an earlier turn that has not ended."""
        listening = Listening(self.events, changed)
        _, places = self.sessions[session.session_id]
        self.capacity.turn_begins(session.session_id)
        deadline = self.capacity.first_packet_due(session.session_id)

        def begin() -> None:
            self._n_turns += 1
            turn = Turn(self, session, places, spec, listening, self._n_turns)
            turn.deadline = deadline
            self.turns[session.session_id] = turn
            if places.are_up:
                self.events.after(self.host.to_thinker_s, lambda: self._to_thinker(turn))
            else:
                turn.thinker_ended = True
                self.events.after(0.0, lambda: self.fail(turn))

        before = self.turns.get(session.session_id)
        if before is None or (before.is_over and before.thinker_ended):
            begin()
        else:
            self._next[session.session_id] = begin
        return listening

    def _to_thinker(self, turn: Turn) -> None:
        if turn.is_over:
            return self._thinker_ended(turn)
        kv = turn.places.thinker.kv
        prompt = kv.prompt(turn.session, turn.spec.audio_s)
        header = kv.header
        n_prompt = header + prompt.n_cached + prompt.n_new
        turn.thinker = Request(
            rid=f"think-{turn.rid}",
            prompt_tokens=n_prompt,
            cached_tokens=n_prompt - prompt.pieces[-1].n_tokens,
            max_new=turn.spec.n_tokens,
            reserve=turn.spec.n_tokens,
            audio_s=turn.spec.audio_s,
            owner=turn,
            keeps_prefix=True,
        )
        if kv.tiers is not None and kv.tiers.on_host(turn.session):
            turn.thinker.load = kv.tiers.load(turn.session)
        turn.talker = turn.talker_request(prompt.n_user, self._talker_reserve)
        Thinking(
            events=self.events,
            engine=turn.places.thinker.engine,
            host=self.host,
            header=header,
            session=turn.session,
            prompt=prompt,
            request=turn.thinker,
        ).begin()

    @property
    def _talker_reserve(self) -> int:
        """max_new_tokens of the talker's requests (TalkerWindow in bridge/scheduler/talker.py)."""
        return 2048 + 256 + 11 if self.policies.retention else 16_384

    def _thinker_ended(self, turn: Turn) -> None:
        turn.thinker_ended = True
        self._go_on(turn)

    def _go_on(self, turn: Turn) -> None:
        """Begin the session's next turn, if it waits for the end of this one."""
        session = turn.session
        if not (turn.is_over and turn.thinker_ended):
            return
        if session.is_closed and session.n_tokens:
            turn.places.thinker.kv.close(session)
        begin = self._next.pop(session.session_id, None)
        if begin is not None:
            begin()

    # --- results of the thinker ---

    def tokens_came(self, reqs: list[Request]) -> None:
        first: list[Turn] = []
        later: list[Turn] = []
        for req in reqs:
            turn: Turn = req.owner
            turn.n_tokens += 1
            (later if turn.n_tokens > 1 else first).append(turn)
        for turn in first:
            self.events.after(self.host.to_talker_s, partial(self._to_talker, turn))
        news: dict[Engine, list[tuple[Turn, int]]] = {}
        for turn in later:
            news.setdefault(turn.places.talker.engine, []).append((turn, turn.n_tokens))
        for engine, own in news.items():
            self.events.after(self.host.text_s, partial(engine.post, partial(self._text_came, own)))

    def _to_talker(self, turn: Turn) -> None:
        request = turn.talker
        if turn.is_over or request is None:
            return
        engine = turn.places.talker.engine
        engine.post(lambda: engine.add(request))

    @staticmethod
    def _text_came(news: list[tuple[Turn, int]]) -> None:
        for turn, n_tokens in news:
            assert turn.talker is not None
            is_complete = n_tokens >= turn.spec.n_tokens
            turn.talker.n_text = math.inf if is_complete else max(turn.talker.n_text, n_tokens)

    def thinker_finished(self, req: Request) -> None:
        turn: Turn = req.owner
        session, thinker = turn.session, turn.places.thinker
        thinker.feed.forget(req.rid)
        header = thinker.kv.header
        n_kept = req.prompt_tokens - header + req.n_out
        held = req.kv - header if req.computed else session.n_device
        thinker.engine.pool.release(max(0, held - n_kept))
        n_kept = min(n_kept, held)
        thinker.kv.ended(session, n_kept, req.n_out, aborted=req.is_aborted)
        turn.thinker_ended = True
        self._expect(turn)
        if turn.is_over:
            self._keep_heard(turn)
        self._complete(turn)
        self._go_on(turn)

    # --- results of the talker ---

    def frames_came(self, reqs: list[Request]) -> None:
        turns = []
        for req in reqs:
            if req.n_out > 1:  # the prefill completes no frame
                req.owner.n_frames += 1
                turns.append(req.owner)
        self.n_frames += len(turns)
        if turns:
            self.events.after(self.host.to_client_s / 2, lambda: self._to_vocoder(turns))

    def _to_vocoder(self, turns: list[Turn]) -> None:
        for turn in turns:
            if not turn.is_over:
                turn.frame_came()
                turn.places.vocoder.vocoder.feed(turn.vocoder, 1)

    def talker_finished(self, req: Request) -> None:
        turn: Turn = req.owner
        turn.places.talker.feed.forget(req.rid)
        if not turn.is_over:
            vocoder = turn.places.vocoder.vocoder
            self.events.after(self.host.to_client_s / 2, lambda: vocoder.end(turn.vocoder))

    # --- audio ---

    def audio_came(self, turn: Turn, audio_s: float) -> None:
        if self._startup is None:
            self._pass_on(turn, audio_s)
        else:
            self._startup.came(turn, audio_s, lambda one_s: self._pass_on(turn, one_s))

    def _pass_on(self, turn: Turn, audio_s: float) -> None:
        self.events.after(self.host.to_client_s / 2, lambda: self._send(turn, audio_s))

    def _send(self, turn: Turn, audio_s: float) -> None:
        if turn.is_over:
            return
        if turn.deadline is not None:
            self.capacity.came(turn.deadline)
            turn.deadline = None
        turn.playback.sent(audio_s)
        left_s = audio_s
        while left_s > 1e-9:
            turn.listening.audio(min(left_s, _PACKET_S))
            left_s -= _PACKET_S

    def audio_complete(self, turn: Turn) -> None:
        def end() -> None:
            self.events.after(self.host.to_client_s / 2, lambda: self._all_sent(turn))

        if self._startup is None:
            end()
        else:
            self._startup.ended(turn, end)

    def _all_sent(self, turn: Turn) -> None:
        if not turn.is_over:
            turn.playback.finish()
            self._complete(turn)

    def _complete(self, turn: Turn) -> None:
        """End the response if text and audio are complete."""
        if turn.is_over or not (turn.playback.clock.finished and turn.n_tokens):
            return
        if turn.thinker is None or not turn.thinker.is_finished:
            return
        turn.is_over = True
        gap_s = max(turn.listening.playback.gaps_s, default=0.0)
        self.capacity.flowed(turn.session.session_id, gap_s)
        turn.listening.done("completed")
        self._go_on(turn)

    # --- interruption ---

    def interrupt(self, session: Session) -> None:
        """The user speaks, or leaves: end the response, and keep what was heard of it."""
        turn = self.turns.get(session.session_id)
        if turn is None or (turn.is_over and turn.playback.is_over):
            return
        was_over = turn.is_over
        turn.is_over = True
        turn.n_heard_tokens = int(turn.playback.stop() / turn.per_token_s)
        if was_over:  # all was sent, and not all was heard
            self._keep_heard(turn)
            return
        if turn.deadline is not None:
            self.capacity.abandoned(turn.deadline)
        if self._startup is not None:
            self._startup.dropped(turn)
        if turn.control.can_interrupt:
            turn.control.interrupt()
        else:
            self.end_thinker(turn, keeps_kv=False)
            self.cancel_talker(turn)
            turn.places.vocoder.vocoder.cancel(turn.vocoder)
        turn.listening.done("cancelled")
        if turn.thinker_ended:
            self._keep_heard(turn)
            self._go_on(turn)

    def speech_started(self, session: Session) -> None:
        """The user speaks; over a response that is audible it is an interruption."""
        turn = self.turns.get(session.session_id)
        _, places = self.sessions[session.session_id]
        tiers = places.thinker.kv.tiers
        if turn is not None and turn.is_over and turn.playback.is_over:
            gap_s = max(0.0, self.events.now_s() - turn.playback.clock.dry_at_s)
            session.stats.add_gap(gap_s)
            if tiers is not None:
                tiers.expect(session, 0.0, gap_s)
        if tiers is not None:
            tiers.speech_started(session)

    def _expect(self, turn: Turn) -> None:
        """Tell when the user will have heard all of the text that the thinker has made."""
        tiers = turn.places.thinker.kv.tiers
        if tiers is not None and turn.thinker is not None:
            heard_s = turn.playback.clock.heard_s(self.events.now_s())
            to_play_s = 0.0 if turn.is_over else turn.n_tokens * turn.per_token_s - heard_s
            tiers.expect(turn.session, to_play_s)

    def _keep_heard(self, turn: Turn) -> None:
        assert turn.thinker is not None
        n_response = turn.thinker.n_out
        turn.places.thinker.kv.heard(turn.session, n_response, min(turn.n_heard_tokens, n_response))

    def end_thinker(self, turn: Turn, *, keeps_kv: bool) -> None:
        request, engine = turn.thinker, turn.places.thinker.engine
        if request is None or request.is_finished:
            return

        def end() -> None:
            if request.is_finished:
                return
            if keeps_kv:
                request.max_new = max(1, request.n_out)
            else:
                engine.abort(request)

        self.events.after(self.host.report_s, lambda: engine.post(end))

    def cancel_talker(self, turn: Turn) -> None:
        request, engine = turn.talker, turn.places.talker.engine
        if request is None or request.is_finished:
            return

        def end() -> None:
            if not request.is_finished:
                engine.abort(request)

        self.events.after(self.host.report_s, lambda: engine.post(end))

    # --- failures ---

    def fail(self, turn: Turn) -> None:
        """A stage is down: the turn ends."""
        if not turn.is_over:
            turn.is_over = True
            turn.playback.stop()
            if turn.deadline is not None:
                self.capacity.failed(turn.deadline)
            if self._startup is not None:
                self._startup.dropped(turn)
            self.end_thinker(turn, keeps_kv=False)
            self.cancel_talker(turn)
            turn.places.vocoder.vocoder.cancel(turn.vocoder)
            turn.listening.done("failed")
        self._go_on(turn)
