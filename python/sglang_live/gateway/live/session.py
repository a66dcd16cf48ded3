"""One connection of the Live API: silent until session.start, which makes a session of it.

In: text frames. Out: server events.
Owner: one LiveSession per connection.
"""

import asyncio
import logging

from sglang_live.aio import Timer, close_all
from sglang_live.errors import LiveError
from sglang_live.gateway.call.link import IdleSessionError
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.draining import CLOSE_SERVICE_RESTART
from sglang_live.gateway.errors import CLOSE_POLICY_VIOLATION, ClientEventError
from sglang_live.gateway.live.active import ActiveSession
from sglang_live.gateway.live.backend import Backend
from sglang_live.gateway.live.broadcast import Broadcast
from sglang_live.gateway.live.decisions import Decisions
from sglang_live.gateway.live.duplex_voice import DuplexVoice
from sglang_live.gateway.live.events import (
    AnyClientEvent,
    AudioAppend,
    MessageForm,
    SessionStart,
    parse_client_event,
)
from sglang_live.gateway.live.served_text import ServedText
from sglang_live.gateway.live.session_config import LiveConfig, start_config
from sglang_live.gateway.live.sidebands import LiveSessions
from sglang_live.gateway.live.stream import Stream, error_fields
from sglang_live.gateway.live.turn_voice import TurnVoice
from sglang_live.gateway.live.voice import TICK_MS, Said, Voice
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.webrtc.sound import Track
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)

# From the connection to session.start.
_START_S = 15.0


class NoStartError(LiveError):
    code = "session_start_timeout"
    http_status = 408


class LiveSession:
    """An Attachable (sidebands.py)."""

    resumption = None

    def __init__(
        self,
        session: VoiceSession,
        outbox: Outbox,
        parts: GatewayParts,
        owner: str,
        sessions: LiveSessions,
        track: Track | None = None,
    ):
        """
        Args:
            owner: owner of the client's key, for limits.
            sessions: those that sidebands find.
            track: of a call, whose audio is no events; None: audio is events.
        """
        self.owner = owner
        self.broadcast = Broadcast(outbox)
        self._session = session
        self._outbox = self.broadcast
        self._parts = parts
        self._sessions = sessions
        self._track = track
        self._active: ActiveSession | None = None
        self._over: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._gone: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._restart = ""  # why, where the server ends the call
        self._start_limit = Timer(parts.clock, self._on_no_start, "session start")
        self._start_limit.arm(_START_S)

    @property
    def at_work(self) -> bool:
        return self._active is not None and self._active.at_work

    async def handle(self, frame: str) -> None:
        """Raises LiveError if the event is refused. Before the start, that is the end."""
        if self._over.done():
            return  # what the client sent before it knew
        if self._active is not None:
            event = parse_client_event(frame)
            if isinstance(event, AudioAppend) and self._track is not None:
                raise _own_audio()
            await self._active.handle(event)
            return
        try:
            await self._start(parse_client_event(frame))
        except LiveError as error:
            self._end(CLOSE_POLICY_VIOLATION, error.code)
            raise

    async def hear(self, pcm: bytes) -> None:
        if self._track is None:
            raise ClientEventError("Binary frames hold no events.", code="invalid_event")
        if self._active is not None and not self._over.done():
            self._active.hear(pcm)

    def read(self, n_read: int) -> None:
        """Nothing resumes a session of this protocol."""

    async def until_over(self) -> tuple[int, str]:
        return await asyncio.shield(self._over)

    def part(self, error: LiveError) -> None:
        # At a restart the client is not told that all was completed: it connects again.
        if isinstance(error, IdleSessionError) and self._active is not None:
            self._active.finish("expired")
        else:
            self._restart = error.code

    async def close(self) -> None:
        active, gone = self._active, (CLOSE_SERVICE_RESTART, self._restart)
        if active is not None and not self._over.done() and not self._restart:
            active.finish("connection_lost")  # sidebands hear of it
        self._sessions.remove(self._session.session_id)
        if not self._gone.done():
            self._gone.set_result(self._over.result() if self._over.done() else gone)
        await close_all(self._start_limit.disarm, *((active.close,) if active else ()))

    async def _start(self, event: AnyClientEvent) -> None:
        if not isinstance(event, SessionStart):
            raise ClientEventError(
                "The first event of a session is session.start.",
                code="session_not_started",
                param="type",
            )
        track = self._track
        config = start_config(event.session, self._parts, self.owner, on_track=track is not None)
        call = config.call
        stream = Stream(self._outbox, call.output_format, self._parts.metrics, track)
        voice = self._voice(config, stream)
        try:
            await voice.begin([_said(message) for message in event.session.input or ()])
        except BaseException:
            await voice.close()
            raise
        stream.voice = voice
        stream.worker = worker = self._worker(voice, config)
        self._start_limit.disarm()
        self._active = ActiveSession(
            self._session.session_id,
            config,
            voice,
            stream,
            self._outbox,
            self._parts,
            on_over=self._end,
            worker=worker,
        )
        self._active.start(event.event_id)
        self._sessions.add(self._session.session_id, self)

    def _voice(self, config: LiveConfig, stream: Stream) -> Voice:
        of = self._session, config.call, self._parts
        if self._parts.orchestrator.duplex_s:
            return DuplexVoice(*of, self.owner)
        delay_ms, track = config.acknowledgement_delay_ms, self._track
        early_s = TICK_MS / 1000 + (track.EARLY_S if track else 0)
        return TurnVoice(*of, stream, self.owner, delay_ms, early_s)

    # --- for sidebands ---

    def show(self, outbox: Outbox) -> None:
        assert self._active is not None
        outbox.emit("session.started", session=self._active.resource())

    async def handle_aside(self, frame: str) -> None:
        event = parse_client_event(frame)
        if isinstance(event, AudioAppend):
            raise _own_audio()
        if self._active is not None and not self._over.done():
            await self._active.handle(event)

    def hang_up(self) -> None:
        if self._active is not None and not self._over.done():
            self._active.finish("close_requested")

    async def until_gone(self) -> tuple[int, str]:
        return await asyncio.shield(self._gone)

    def _worker(self, voice: Voice, config: LiveConfig) -> Backend | Decisions | None:
        session, outbox, parts, owner = self._session, self._outbox, self._parts, self.owner
        if config.backend is not None:
            served = ServedText(session, voice, owner)
            return Backend(voice, outbox, parts, owner, config.backend, served)
        if config.decisions is not None:
            refuse = self._refuse
            return Decisions(session, voice, outbox, parts, owner, config.decisions, refuse)
        return None

    def _refuse(self, error: LiveError, event_id: str | None) -> None:
        self._parts.metrics.errors.labels(error.code).inc()
        self._outbox.emit("error", **error_fields(error, event_id))

    def _on_no_start(self) -> None:
        error = NoStartError(f"There was no session.start within {_START_S:g} s.")
        self._refuse(error, None)
        self._end(CLOSE_POLICY_VIOLATION, error.code)

    def _end(self, code: int, reason: str) -> None:
        if not self._over.done():
            self._over.set_result((code, reason))


def _own_audio() -> ClientEventError:
    return ClientEventError(
        "The session's own connection carries its audio.", code="unsupported_event", param="type"
    )


def _said(message: MessageForm) -> Said:
    role = "system" if message.role == "developer" else message.role
    return Said(role, message.content[0].text)
