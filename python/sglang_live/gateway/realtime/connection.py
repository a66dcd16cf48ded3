"""One realtime connection, from the first frame to the last.

In: text frames. Out: text frames.
Owner: one RealtimeConnection per socket. Three kinds of task: reading (strictly in order),
sending, and the responses; reading never waits for an answer, so that a caller can always
interrupt.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Protocol

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.draining import CLOSE_SERVICE_RESTART, DrainingError
from sglang_live.gateway.errors import ClientEventError, error_body, internal_error
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.realtime.events import (
    AnyClientEvent,
    SessionForm,
    event_id_of,
    parse_client_event,
)
from sglang_live.gateway.realtime.outbox import Outbox
from sglang_live.gateway.realtime.services import RealtimeServices
from sglang_live.gateway.realtime.session import RealtimeSession
from sglang_live.orchestrator.session import VoiceSession

log = logging.getLogger(__name__)

CLOSE_NORMAL = 1000
CLOSE_POLICY_VIOLATION = 1008
CLOSE_INTERNAL_ERROR = 1011
CLOSE_TRY_AGAIN_LATER = 1013

# A client that does not read cannot take a close frame either; do not wait for it for long.
_CLOSE_GRACE_S = 0.5
# How often a call that is idle is looked at for the end of its answer.
_IDLE_STEP_S = 1.0
# Playback ends by the clock, without an event.
_LOOK_EVERY_S = 0.1


class IdleSessionError(LiveError):
    code = "session_idle"
    http_status = 408


class Wire(Protocol):
    """The socket, as the connection needs it."""

    async def receive(self) -> str | bytes | None:
        """Next frame, bytes for a binary one, None when the client is gone."""
        ...

    async def send(self, frame: str) -> None: ...

    async def close(self, code: int, reason: str) -> None: ...


class RealtimeConnection:
    """preset: what the session is to be from the beginning. owner: of the key it came with."""

    def __init__(
        self,
        wire: Wire,
        services: RealtimeServices,
        preset: SessionForm | None = None,
        owner: str = ANONYMOUS,
    ):
        self._owner = owner
        self._heard_at_s = services.clock.now_s()
        self.session_id = new_id("sess")
        self._preset = preset
        self._wire = wire
        self._services = services
        self._metrics = services.metrics
        self._outbox = Outbox(wire.send, services.config.send_buffer_bytes)

    async def run(self) -> None:
        """Serve until the client leaves. Never raises for what a client or a stage does."""
        sender = asyncio.create_task(self._outbox.drain())
        try:
            session = await self._services.orchestrator.open_session(self.session_id)
        except Exception as error:
            await self._refuse(error, sender)
            return
        self._metrics.sessions.inc()
        self._metrics.sessions_open.inc()
        log.info("session_opened session=%s", self.session_id)
        try:
            await self._serve(session, sender)
        finally:
            self._metrics.sessions_open.dec()
            log.info("session_closed session=%s", self.session_id)
            await self._close_session(session)

    async def _refuse(self, error: Exception, sender: asyncio.Task[None]) -> None:
        code = CLOSE_TRY_AGAIN_LATER
        if not isinstance(error, LiveError):
            log.error("open_session_crashed session=%s", self.session_id, exc_info=error)
            error, code = internal_error(), CLOSE_INTERNAL_ERROR
        self._metrics.sessions_refused.labels(error.code).inc()
        self._emit_error(error, None)
        self._outbox.close()
        await asyncio.wait({sender}, timeout=_CLOSE_GRACE_S)
        await _end(sender)
        await self._close(code, error.code)

    async def _serve(self, session: VoiceSession, sender: asyncio.Task[None]) -> None:
        call = RealtimeSession(session, self._outbox, self._services, self._preset, self._owner)
        call.greet()
        reader = asyncio.create_task(self._read(call))
        lost = asyncio.create_task(self._outbox.until_lost())
        drained = asyncio.create_task(self._until_drained(call))
        idle = asyncio.create_task(self._until_idle(call))
        tasks = (reader, sender, lost, drained, idle)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if idle.done() and not idle.cancelled():
                self._emit_error(idle.result(), None)
            if any(task.done() and not task.cancelled() for task in (drained, idle)):
                self._outbox.close()  # what was said is still sent
                await asyncio.wait({sender, lost}, timeout=_CLOSE_GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            await call.close()
            await _end(*tasks)
        if not idle.cancelled():
            self._metrics.clients_dropped.labels("idle").inc()
            log.info("client_idle session=%s", self.session_id)
            await self._close(CLOSE_NORMAL, IdleSessionError.code)
        elif not drained.cancelled():
            self._metrics.clients_dropped.labels("draining").inc()
            await self._close(CLOSE_SERVICE_RESTART, DrainingError.code)
        elif not lost.cancelled():
            self._metrics.clients_dropped.labels(lost.result()).inc()
            log.warning("client_dropped session=%s reason=%s", self.session_id, lost.result())
            await self._close(CLOSE_POLICY_VIOLATION, "client does not read")
        elif not sender.cancelled() and (error := sender.exception()):
            # What is told of sent audio went wrong, which is a bug; the network never ends it so.
            self._metrics.errors.labels(internal_error().code).inc()
            log.error("sender_crashed session=%s", self.session_id, exc_info=error)
            await self._close(CLOSE_INTERNAL_ERROR, internal_error().code)

    async def _until_drained(self, call: RealtimeSession) -> None:
        """The server is about to stop, and nothing of this call is left to wait for."""
        drain = self._services.drain
        await drain.began.wait()
        while call.at_work and not drain.over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(drain.over.wait(), _LOOK_EVERY_S)

    async def _until_idle(self, call: RealtimeSession) -> IdleSessionError:
        """The client has sent nothing for too long, and no answer is made or heard."""
        clock, limit_s = self._services.clock, self._services.config.idle_session_s
        if limit_s is None:
            await asyncio.Event().wait()
        while (left_s := self._heard_at_s + limit_s - clock.now_s()) > 0 or call.at_work:
            await clock.sleep(max(left_s, min(_IDLE_STEP_S, limit_s)))
        return IdleSessionError(f"The client sent nothing for {limit_s:g} s.")

    async def _read(self, call: RealtimeSession) -> None:
        while True:
            frame = await self._wire.receive()
            self._heard_at_s = self._services.clock.now_s()
            if frame is None:
                return
            await self._handle(frame, call)

    async def _handle(self, frame: str | bytes, call: RealtimeSession) -> None:
        event_id = None
        try:
            event = self._parse(frame)
            event_id = event.event_id
            await call.handle(event)
        except LiveError as error:
            self._emit_error(error, event_id or _readable_event_id(frame, error))
        except Exception:
            # The edge of the process towards one client: a bug must cost this event, not the call.
            log.exception("event_crashed session=%s", self.session_id)
            self._emit_error(internal_error(), event_id)

    def _parse(self, frame: str | bytes) -> AnyClientEvent:
        if isinstance(frame, bytes):
            raise ClientEventError("Binary frames carry no events.", code="invalid_event")
        max_bytes = self._services.config.max_frame_bytes
        if len(frame) > max_bytes:
            raise ClientEventError(
                f"Event too large: at most {max_bytes} bytes.", code="event_too_large"
            )
        return parse_client_event(frame)

    def _emit_error(self, error: LiveError, event_id: str | None) -> None:
        self._metrics.errors.labels(error.code).inc()
        self._outbox.emit("error", error={**error_body(error), "event_id": event_id})

    async def _close_session(self, session: VoiceSession) -> None:
        try:
            await session.close()
        except Exception:
            log.exception("session_close_crashed session=%s", self.session_id)

    async def _close(self, code: int, reason: str) -> None:
        try:
            await asyncio.wait_for(self._wire.close(code, reason), _CLOSE_GRACE_S)
        except Exception as error:  # whatever the socket says, there is nobody left to tell
            log.debug("close_failed session=%s error=%r", self.session_id, error)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Errors of the socket are among how they end, and do not matter any more."""
    for task in tasks:
        task.cancel()
    # Not gather(): it replaces the reason for which we are cancelled ourselves, if we are.
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen


def _readable_event_id(frame: str | bytes, error: LiveError) -> str | None:
    if isinstance(frame, bytes) or error.code in ("invalid_json", "event_too_large"):
        return None
    return event_id_of(frame)
