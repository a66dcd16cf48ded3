"""The simulated server: the orchestrator and the gateway's sessions over simulated stages.

In: sessions, ends of utterances, interruptions. Out: audio packets and ends of responses, to the
turn's Listening. Times that the device model does not have are in HostTimes.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from sglang_live.capacity.control import CapacityConfig, CapacityControl
from sglang_live.core import AudioPart, HistoryItem, TextPart, TranscriptDelta, TurnRequest
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.loop import SimulatedLoop
from sglang_live.extensions.planner.simulation.server.call import Call, silence
from sglang_live.extensions.planner.simulation.server.link import Sizes
from sglang_live.extensions.planner.simulation.server.listening import Listening
from sglang_live.extensions.planner.simulation.server.replicas import Process, Replicas
from sglang_live.extensions.planner.simulation.server.thinker_session import TURN_MARKUP_TOKENS
from sglang_live.extensions.planner.simulation.server.turn_spec import TurnSpec
from sglang_live.extensions.planner.simulation.spec import ServerSpec
from sglang_live.extensions.planner.simulation.workload import NEW, History
from sglang_live.gateway.call.settings import SessionConfig, Truncation, TurnConfig
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.parts import GatewayParts
from sglang_live.interaction.silero import SpeechModel
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.sessions import Orchestrator, VoiceSession
from sglang_live.orchestrator.stage_jobs import Segment
from sglang_live.policy.policies import Policies
from sglang_live.stages.supervisor import PING_EVERY_S, Supervisor

T = TypeVar("T")
_VOICE = "voice"
# Between two acks of a client that sends them.
_ACK_EVERY_S = 0.2


OnClientEvent = Callable[[Call, str, float, dict[str, Any]], None]


def ignore_event(call: Call, event_type: str, audio_s: float, fields: dict[str, Any]) -> None:
    """Until on_client_event is set to another."""


class Server:
    """
    Attributes:
        events, loop: time, and what runs in it.
        replicas: of the stages.
        config: of all sessions.
        sessions: open ones.
        closing_s: for how long each session was closed that is.
        on_client_event: called with all that reaches a client: the call, the event's type, the
            seconds of audio in it, and its fields.
    """

    def __init__(self, spec: ServerSpec, policies: Policies, events: Events):
        self.spec = spec
        self.policies = policies
        self.events = events
        self.loop = SimulatedLoop(events)  # type: ignore[abstract]
        self.sessions: dict[str, Session] = {}
        self.closing_s: list[float] = []
        self._drawn: dict[str, TurnSpec] = {}
        self.replicas = Replicas(spec, policies, events, self._drawn)
        self.capacity = CapacityControl(
            CapacityConfig(
                max_sessions=spec.max_sessions,
                adapts=policies.admission,
                admission_first_audio_ms=1000 * spec.first_audio_s,
            ),
            events,
            lambda: self.orchestrator.pools(),
        )
        self.orchestrator = Orchestrator(
            cast(Supervisor, self.replicas),
            model_name="simulated",
            voices=(_VOICE,),
            capacity=self.capacity,
            policies=policies,
            clock=events,
        )
        retention = RetentionConfig() if policies.retention else None
        self.parts = GatewayParts(
            orchestrator=self.orchestrator,
            config=GatewayConfig(
                turns=TurnConfig(
                    preheat=policies.preheat,
                    speculate_ms=spec.speculate_ms if policies.truncate else None,
                ),
                retention=retention,
            ),
            speech_model=cast(SpeechModel, None),  # no microphone is simulated
            clock=events,
            suspects=self.orchestrator.suspects,
        )
        self.config = SessionConfig(
            model="simulated",
            voice=_VOICE,
            truncation=Truncation(retention=retention),
            turn_detection=None,
        )
        self.on_client_event: OnClientEvent = ignore_event
        self._n_posts = 0
        self._pings = False
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def n_frames(self) -> int:
        """Codec frames that the talkers have made."""
        return self.replicas.n_frames

    @property
    def is_up(self) -> bool:
        """As /health, which a load balancer reads: whether every replica serves."""
        return all(replica.is_up for replica in self.replicas.replicas)

    def run(self, until_s: float = float("inf")) -> None:
        """Run until nothing is left to happen, or until then."""
        self.loop.run(until_s)

    def end(self) -> None:
        """Of a run that is not to go on."""
        self.loop.end()

    # --- sessions ---

    def open(self, session_id: str, history: History = NEW) -> "Session":
        """Raises LiveError if the server has no room, or no replica of a stage is up."""
        voice = _at_once(self.orchestrator.open_session(session_id))
        session = Session(self, voice)
        self.sessions[session_id] = session
        if history.n_tokens:
            self._resume(session, history)
        self._ping()
        return session

    def _resume(self, session: "Session", history: History) -> None:
        """The new session has been going on for a while."""
        n_user = max(TURN_MARKUP_TOKENS, history.n_user)
        text = TextPart("x" * (n_user - TURN_MARKUP_TOKENS))
        ids = tuple(range(1, max(1, history.n_tokens - n_user) + 1))
        user = HistoryItem(key="before-user", role="user", parts=(text,))
        said = HistoryItem(key="before-said", role="assistant", parts=(), token_ids=ids)
        session.call.restore((user, said))
        if not history.has_kv:
            return
        sizes = {user.key: Sizes(n_user), said.key: Sizes(len(ids))}
        for process in self.replicas.processes:
            if session.session_id in process.entry.sessions:
                process.stage.resume(session.session_id, (user, said), sizes)
        segments = session.call.voice.links.thinker.segments
        segments[user.key] = Segment([0] * n_user, None)

    def close(self, session: "Session") -> None:
        """Its client ends the connection."""
        if self.sessions.pop(session.session_id, None) is not None:
            session.call.vanish()
            task = self.loop.create_task(self._close(session), name="close")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def vanish(self, session: "Session", noticed_s: float) -> None:
        """Its client is gone without a word, which the gateway notices after a while."""
        session.call.vanish()
        self.events.after(noticed_s, lambda: self.close(session))

    async def _close(self, session: "Session") -> None:
        began_s = self.events.now_s()
        await session.call.close()
        self.closing_s.append(self.events.now_s() - began_s)
        self._drawn.pop(session.session_id, None)

    def _ping(self) -> None:
        """The supervisor's pings, while there are sessions."""
        if not self._pings:
            self._pings = True
            self.events.after(PING_EVERY_S, self._pinged)

    def _pinged(self) -> None:
        self._pings = False
        for process in self.replicas.processes:
            if process.entry.is_up:
                self.replicas.ping(process)
        if self.orchestrator.sessions:
            self._ping()

    # --- turns ---

    def take_turn(
        self, session: "Session", spec: TurnSpec, changed: Callable[[], None]
    ) -> Listening:
        """The user's turn is over: respond."""
        return session.take_turn(spec, changed)

    def interrupt(self, session: "Session") -> None:
        """The user speaks over a response."""
        session.call.interrupt(session.onset_s)

    def speech_started(self, session: "Session", end_s: float = 0.0) -> None:
        """A voice, which may be the user's turn; over a response it may be none."""
        session.onset_s = self.events.now_s()
        session.call.speech_began(session.onset_s, end_s)

    def paused(self, session: "Session", spec: TurnSpec, said_s: float) -> None:
        """The user is silent for speculate_ms, and has spoken for said_s; the response is drawn."""
        if self.speculate_s is not None:
            self.draw(session.session_id, spec)
            session.call.paused(said_s)

    def resumed(self, session: "Session") -> None:
        """The user speaks again."""
        session.call.resumed()

    @property
    def speculate_s(self) -> float | None:
        """Silence before a speculative turn; None: none begins."""
        speculate_ms = self.parts.config.turns.speculate_ms
        return None if speculate_ms is None else speculate_ms / 1000

    def draw(self, session_id: str, spec: TurnSpec) -> None:
        """The response of the session's next turn."""
        self._drawn[session_id] = spec

    # --- messages of others than the sessions here ---

    def post(self, audio_s: float, n_tokens: int, came: Callable[[], None]) -> None:
        """A message in a session of its own, answered in text. came: called with each token."""
        self._n_posts += 1
        session_id = f"post-{self._n_posts}"
        self.draw(session_id, TurnSpec(audio_s=audio_s, n_tokens=n_tokens, n_frames=1))
        task = self.loop.create_task(self._post(session_id, audio_s, came))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _post(self, session_id: str, audio_s: float, came: Callable[[], None]) -> None:
        voice = await self.orchestrator.open_session(session_id, admitted=False)
        item = HistoryItem(key="message", role="user", parts=(AudioPart(silence(audio_s)),))
        turn = TurnRequest(instructions="", history=(item,), voice=_VOICE, wants_audio=False)
        try:
            async for event in voice.respond(turn):
                if isinstance(event, TranscriptDelta):
                    came()
        finally:
            await voice.close()
            del self._drawn[session_id]

    # --- failures ---

    def kill(self, process: Process, restart_s: float) -> None:
        """End a replica's process now; the next one serves after restart_s."""
        self.replicas.kill(process)
        self.events.after(restart_s, lambda: self.replicas.start(process))


class Session:
    """A session, and what its client hears.

    Attributes:
        onset_s: of the user's latest voice.
        acks: whether its client reports what it has played.
        acks_lost_until_s: until then these reports are lost.
    """

    def __init__(self, server: Server, voice: VoiceSession):
        self.session_id = voice.session_id
        self.onset_s = self.acks_lost_until_s = 0.0
        self.acks = False
        self._server = server
        self._heard: dict[str, Listening] = {}  # by response
        self.call = Call(
            voice,
            server.parts,
            server.config,
            server.events,
            server.spec.host.to_client_s / 4,
            self._receive,
        )

    def take_turn(self, spec: TurnSpec, changed: Callable[[], None]) -> Listening:
        now_s = self._server.events.now_s()
        listening = Listening(self._server.events, changed)
        self._server.draw(self.session_id, spec)
        self._heard[self.call.respond(spec.audio_s, now_s)] = listening
        return listening

    def _receive(
        self, event_type: str, response_id: str, audio_s: float, fields: dict[str, Any]
    ) -> None:
        self._server.on_client_event(self.call, event_type, audio_s, fields)
        listening = self._heard.get(response_id)
        if listening is None:
            return
        if event_type == "response.output_item.added":
            listening.item_id = fields["item"]["id"]
        elif event_type == "response.output_audio.delta":
            is_first = not listening.packets
            listening.audio(audio_s)
            if is_first and self.acks:
                self._ack(listening)
        elif event_type == "response.done":
            listening.done(fields["response"]["status"])

    def _ack(self, listening: Listening) -> None:
        """Report what was played, now and again until all is."""
        events, playback = self._server.events, listening.playback
        heard_s = playback.received_s - max(0.0, playback.buffered_s)
        if events.now_s() >= self.acks_lost_until_s:
            self.call.ack(listening.item_id, heard_s)
        if listening.is_playing and not self.call.is_cut:
            events.after(_ACK_EVERY_S, lambda: self._ack(listening))


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        return cast(T, ended.value)
    raise AssertionError("it waits")
