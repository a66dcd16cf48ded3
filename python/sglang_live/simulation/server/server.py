"""The simulated server: three stages on devices, and the way of a turn through them.

In: sessions, ends of utterances, interruptions. Out: audio packets and ends of responses, to the
turn's Listening. Times that the device model does not have are in HostTimes.
"""

import math
from collections.abc import Callable
from functools import partial

from sglang_live.bridge.rounds import rounds_of
from sglang_live.capacity.control import CapacityConfig, CapacityControl
from sglang_live.policy.policies import Policies
from sglang_live.simulation.engine.device import Device
from sglang_live.simulation.engine.engine import Consumer, Engine, PeerBoard
from sglang_live.simulation.engine.pool import KvPool
from sglang_live.simulation.engine.requests import Request
from sglang_live.simulation.events import Events
from sglang_live.simulation.server.playback import ProgressFeed
from sglang_live.simulation.server.session import Session
from sglang_live.simulation.server.sessions import TALKER_PREFIX_TOKENS, Sessions
from sglang_live.simulation.server.startup import StartupDelays
from sglang_live.simulation.server.tiers import Tiers
from sglang_live.simulation.server.turn import Listening, Turn, TurnSpec
from sglang_live.simulation.server.vocoder import Vocoder
from sglang_live.simulation.spec import ServerSpec

# SGLang's rows beyond the sessions (stage_specs.py).
_SPARE_ROWS = 8
_PACKET_S = 0.16


class Server:
    """
    Attributes:
        n_frames: codec frames that the talker has made.
    """

    def __init__(self, spec: ServerSpec, policies: Policies, events: Events):
        self.spec, self.policies, self.events, self.host = spec, policies, events, spec.host
        devices = [Device() for _ in range(spec.n_devices)]
        self.devices = devices
        shared, peers = len(devices) == 1, PeerBoard()
        rows = spec.max_sessions + _SPARE_ROWS
        pools = [
            KvPool(name="thinker", total=spec.thinker_tokens, rows=rows),
            KvPool(name="talker", total=spec.talker_tokens, rows=rows),
        ]
        constants = spec.thinker_policy, spec.talker_policy
        consumers: tuple[Consumer, Consumer] = _Tokens(self), _Frames(self)
        self.thinker, self.talker = (
            Engine(
                engine,
                events,
                devices[0 if shared else at],
                pool,
                rounds_of(policies, config, spec.chunk_tokens),
                consumer,
                peers,
            )
            for at, (engine, pool, config, consumer) in enumerate(
                zip(spec.engines, pools, constants, consumers, strict=True)
            )
        )
        self.vocoder = Vocoder(events, devices[-1], spec.model.vocoder, spec.vocoder)
        tiers = Tiers(spec.tier(policies), events, pools[0]) if policies.next_use else None
        self.sessions = Sessions(pools[0], policies, spec.header_tokens, tiers)
        self.thinker_feed = ProgressFeed(events, self.thinker, spec.host.report_s)
        self.talker_feed = ProgressFeed(events, self.talker, spec.host.report_s)
        self._startup = StartupDelays(events) if policies.startup_delay else None
        self.capacity = CapacityControl(
            CapacityConfig(max_sessions=spec.max_sessions, adapts=policies.admission),
            events,
            self._pool_shares,
        )
        self._turns: dict[str, Turn] = {}  # by session, until its thinker's request has ended
        self._next: dict[str, Callable[[], None]] = {}
        self._n_turns = self.n_frames = 0

    def _pool_shares(self) -> dict[str, float]:
        pools = {"thinker": self.thinker.pool, "talker": self.talker.pool}
        return {name: pool.used / pool.total for name, pool in pools.items()}

    # --- sessions ---

    def open(self, session_id: str) -> Session:
        """Raises CapacityError if the server has no room."""
        self.capacity.admit()
        return self.sessions.open(session_id)

    def close(self, session: Session) -> None:
        if session.is_closed:
            return
        self.interrupt(session)
        self._next.pop(session.session_id, None)
        session.is_closed = True
        turn = self._turns.get(session.session_id)
        if turn is None or turn.thinker_ended:
            self.sessions.close(session)
        self.capacity.release()

    # --- turns ---

    def take_turn(self, session: Session, spec: TurnSpec, changed: Callable[[], None]) -> Listening:
        """The user's turn is over: respond. Waits for an earlier turn that has not ended."""
        listening = Listening(self.events, changed)
        deadline = self.capacity.first_packet_due(session.session_id)

        def begin() -> None:
            self._n_turns += 1
            turn = Turn(self, session, spec, listening, self._n_turns)
            turn.deadline = deadline
            self._turns[session.session_id] = turn
            self.events.after(self.host.to_thinker_s, lambda: self._to_thinker(turn))

        before = self._turns.get(session.session_id)
        if before is None or (before.is_over and before.thinker_ended):
            begin()
        else:
            self._next[session.session_id] = begin
        return listening

    def _to_thinker(self, turn: Turn) -> None:
        if turn.is_over:
            return self._thinker_ended(turn)
        prompt = self.sessions.prompt(turn.session, turn.spec.audio_s)
        header = self.sessions.header
        n_prompt = header + prompt.n_cached + prompt.n_new
        turn.thinker = Request(
            rid=f"think-{turn.rid}",
            prompt_tokens=n_prompt,
            cached_tokens=n_prompt - prompt.n_new,
            max_new=turn.spec.n_tokens,
            reserve=turn.spec.n_tokens,
            audio_s=turn.spec.audio_s,
            owner=turn,
            keeps_prefix=True,
        )
        tiers = self.sessions.tiers
        if tiers is not None and tiers.on_host(turn.session):
            turn.thinker.load = tiers.load(turn.session)
        n_talker = turn.session.talker_prompt + TALKER_PREFIX_TOKENS
        n_new = prompt.n_user + TALKER_PREFIX_TOKENS
        turn.talker = Request(
            rid=f"speak-{turn.rid}",
            prompt_tokens=n_talker,
            cached_tokens=n_talker - n_new,
            max_new=turn.spec.n_frames + 1,
            reserve=self._talker_reserve,
            owner=turn,
            n_text=1 if turn.spec.n_tokens > 1 else math.inf,
        )
        request = turn.thinker
        self.thinker.post(lambda: self.thinker.add(request))

    @property
    def _talker_reserve(self) -> int:
        """max_new_tokens of the talker's requests (bridge/scheduler/talker_window.py)."""
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
            self.sessions.close(session)
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
        if later:
            news = [(turn, turn.n_tokens) for turn in later]
            self.events.after(
                self.host.text_s, lambda: self.talker.post(lambda: self._text_came(news))
            )

    def _to_talker(self, turn: Turn) -> None:
        request = turn.talker
        if turn.is_over or request is None:
            return
        self.talker.post(lambda: self.talker.add(request))

    @staticmethod
    def _text_came(news: list[tuple[Turn, int]]) -> None:
        for turn, n_tokens in news:
            assert turn.talker is not None
            is_complete = n_tokens >= turn.spec.n_tokens
            turn.talker.n_text = math.inf if is_complete else max(turn.talker.n_text, n_tokens)

    def thinker_finished(self, req: Request) -> None:
        turn: Turn = req.owner
        session = turn.session
        self.thinker_feed.forget(req.rid)
        n_kept = req.prompt_tokens - self.sessions.header + req.n_out
        held = req.kv - self.sessions.header if req.computed else session.n_device
        self.thinker.pool.release(max(0, held - n_kept))
        n_kept = min(n_kept, held)
        self.sessions.ended(session, n_kept, req.n_out, aborted=req.is_aborted)
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
                self.vocoder.feed(turn.vocoder, 1)

    def talker_finished(self, req: Request) -> None:
        turn: Turn = req.owner
        self.talker_feed.forget(req.rid)
        if not turn.is_over:
            self.events.after(self.host.to_client_s / 2, lambda: self.vocoder.end(turn.vocoder))

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
        turn = self._turns.get(session.session_id)
        if turn is None or (turn.is_over and turn.playback.is_over):
            return
        was_over, turn.is_over = turn.is_over, True
        turn.n_heard_tokens = int(turn.playback.stop() / turn.per_token_s)
        if was_over:  # all was sent, and not all was heard
            self._keep_heard(turn)
            return
        if turn.deadline is not None:
            self.capacity.gone(turn.deadline)
        if self._startup is not None:
            self._startup.dropped(turn)
        if turn.control.can_interrupt:
            turn.control.interrupt()
        else:
            self.end_thinker(turn, keeps_kv=False)
            self.cancel_talker(turn)
            self.vocoder.cancel(turn.vocoder)
        turn.listening.done("cancelled")
        if turn.thinker_ended:
            self._keep_heard(turn)
            self._go_on(turn)

    def speech_started(self, session: Session) -> None:
        """The user speaks; over a response that is audible it is an interruption."""
        turn, tiers = self._turns.get(session.session_id), self.sessions.tiers
        if turn is not None and turn.is_over and turn.playback.is_over:
            gap_s = max(0.0, self.events.now_s() - turn.playback.clock.dry_at_s)
            session.stats.add_gap(gap_s)
            if tiers is not None:
                tiers.expect(session, 0.0, gap_s)
        if tiers is not None:
            tiers.speech_started(session)

    def _expect(self, turn: Turn) -> None:
        """Tell when the user will have heard all of the text that the thinker has made."""
        if self.sessions.tiers is not None and turn.thinker is not None:
            heard_s = turn.playback.clock.heard_s(self.events.now_s())
            to_play_s = 0.0 if turn.is_over else turn.n_tokens * turn.per_token_s - heard_s
            self.sessions.tiers.expect(turn.session, to_play_s)

    def _keep_heard(self, turn: Turn) -> None:
        assert turn.thinker is not None
        n_response = turn.thinker.n_out
        self.sessions.heard(turn.session, n_response, min(turn.n_heard_tokens, n_response))

    def end_thinker(self, turn: Turn, *, keeps_kv: bool) -> None:
        request = turn.thinker
        if request is None or request.is_finished:
            return

        def end() -> None:
            if request.is_finished:
                return
            if keeps_kv:
                request.max_new = max(1, request.n_out)
            else:
                self.thinker.abort(request)

        self.events.after(self.host.report_s, lambda: self.thinker.post(end))

    def cancel_talker(self, turn: Turn) -> None:
        request = turn.talker
        if request is None or request.is_finished:
            return

        def end() -> None:
            if not request.is_finished:
                self.talker.abort(request)

        self.events.after(self.host.report_s, lambda: self.talker.post(end))


class _Tokens:
    def __init__(self, server: Server):
        self._server = server

    def outputs(self, reqs: list[Request]) -> None:
        self._server.tokens_came(reqs)

    def finished(self, req: Request) -> None:
        self._server.thinker_finished(req)


class _Frames:
    def __init__(self, server: Server):
        self._server = server

    def outputs(self, reqs: list[Request]) -> None:
        self._server.frames_came(reqs)

    def finished(self, req: Request) -> None:
        self._server.talker_finished(req)
