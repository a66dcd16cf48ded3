"""The link to one client of a call, from the first frame to the last.

In: text frames. Out: text frames.
Owner: one CallLink per call, with one socket at a time. Its tasks read (strictly in order), send,
and run responses. Reading never waits for a response, so that a user can always interrupt.
"""

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sglang_live.aio import background, close_all
from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.call.outbox import STALLED, Outbox
from sglang_live.gateway.call.resumption import Arrival, Resumption
from sglang_live.gateway.call.wire import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_NORMAL,
    CLOSE_TRY_AGAIN_LATER,
    Wire,
)
from sglang_live.gateway.draining import CLOSE_SERVICE_RESTART, RESUME, DrainingError
from sglang_live.gateway.errors import (
    CLOSE_POLICY_VIOLATION,
    ClientEventError,
    internal_error,
)
from sglang_live.gateway.parts import GatewayParts
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import FIRST_EPOCH, VoiceSession
from sglang_live.telemetry.log_context import set_log_ids

if TYPE_CHECKING:  # without a journal it is not imported
    from sglang_live.gateway.call.saved_call import SavedCall

log = logging.getLogger(__name__)

# A client that does not read cannot receive a close frame either, so the wait for it is short.
_CLOSE_GRACE_S = 0.5
# Frames with these errors are not read a second time, for the event's id.
_UNREADABLE = ("invalid_json", "event_too_large")
# Playback ends by the clock, without an event, so its end is polled at these intervals.
_IDLE_POLL_S = 1.0
_DRAIN_POLL_S = 0.1


class IdleSessionError(LiveError):
    code = "session_idle"
    http_status = 408


class CallSession(Protocol):
    """A protocol's side of an open call."""

    @property
    def at_work(self) -> bool:
        """Whether a response runs or plays."""
        ...

    @property
    def resumption(self) -> Resumption | None:
        """By which the call outlives its socket; None: it ends with it."""
        ...

    async def handle(self, frame: str) -> None:
        """The effect of one event. Raises LiveError if it is refused; it then has no effect."""

    async def hear(self, pcm: bytes) -> None:
        """The user's sound from a wire that carries it. Raises LiveError as handle()."""

    def read(self, n_read: int) -> None:
        """handle() or hear() has ended, for the n_read-th frame of the client."""

    async def until_over(self) -> tuple[int, str]:
        """Wait until the protocol ends the call. Returns code and reason to close the socket."""
        ...

    def part(self, error: LiveError) -> None:
        """Tell the client that the server ends the call, and why."""

    async def close(self) -> None:
        """Cancel all tasks and wait, within bounds, until they no longer use the session."""


class CallProtocol(Protocol):
    def open(self, session: VoiceSession, outbox: Outbox) -> CallSession: ...

    def refuse(self, outbox: Outbox, error: LiveError, frame: str | None) -> None:
        """Tell the client of an error. frame: of its event; None: it was none."""


class CallLink:
    def __init__(
        self,
        wire: Wire,
        parts: GatewayParts,
        protocol: CallProtocol,
        kind: str,
        saved: "SavedCall | None" = None,
    ):
        """
        Args:
            kind: prefix of the session's id.
            saved: the call of another gateway, which goes on here; None: it begins.
        """
        self._received_at_s = parts.clock.now_s()
        self.session_id = saved.session_id if saved else new_id(kind)
        self._saved = saved
        self._wire = wire
        self._parts = parts
        self._protocol = protocol
        self._metrics = parts.metrics
        self._outbox = Outbox(wire.send, parts.config.sessions.send_buffer_bytes)
        self._left = asyncio.Event()
        self._reads = True
        self._is_handling = False
        self._is_away = False
        self._n_read = saved.n_settled if saved else 0

    async def run(self) -> None:
        """Serve until the client leaves. Faults of a client or stage raise nothing."""
        set_log_ids(session=self.session_id)
        sender = asyncio.create_task(self._outbox.drain())
        try:
            self._parts.loop_lag.check()
            voice_session = await self._open_session()
        except Exception as error:
            await self._refuse(error, sender)
            return
        self._metrics.sessions.inc()
        self._metrics.sessions_open.inc()
        log.info("session_opened session=%s", self.session_id)
        try:
            await self._serve(voice_session, sender)
        finally:
            self._metrics.sessions_open.dec()
            log.info("session_closed session=%s", self.session_id)
            await self._close_session(voice_session)
            self._left.set()

    async def _open_session(self) -> VoiceSession:
        orchestrator, saved = self._parts.orchestrator, self._saved
        if self._parts.journal is None:
            return await orchestrator.open_session(self.session_id)
        if saved is None:
            return await orchestrator.open_session(self.session_id, epoch=FIRST_EPOCH)
        session = await orchestrator.open_session(
            self.session_id, epoch=saved.epoch, at=saved.addresses
        )
        try:
            await saved.take()
        except LiveError:
            await session.close()
            raise
        self._metrics.sockets_lost.labels("taken_over").inc()
        return session

    async def _refuse(self, error: Exception, sender: asyncio.Task[None]) -> None:
        code = CLOSE_TRY_AGAIN_LATER
        if not isinstance(error, LiveError):
            log.error("open_session_crashed session=%s", self.session_id, exc_info=error)
            error, code = internal_error(), CLOSE_INTERNAL_ERROR
        elif isinstance(error, BadInputError):
            code = CLOSE_POLICY_VIOLATION
        self._metrics.sessions_refused.labels(error.code).inc()
        self._tell(error)
        self._outbox.close()
        await asyncio.wait({sender}, timeout=_CLOSE_GRACE_S)
        await _end(sender)
        await self._close(code, error.code)

    async def _serve(self, voice_session: VoiceSession, sender: asyncio.Task[None]) -> None:
        session = self._protocol.open(voice_session, self._outbox)
        reader = asyncio.create_task(self._read(session))
        lost = asyncio.create_task(self._outbox.until_lost())
        drained = asyncio.create_task(self._until_drained(session))
        idle = asyncio.create_task(self._until_idle(session))
        over = asyncio.create_task(session.until_over())
        ends = (drained, idle, over)
        tasks: tuple[asyncio.Task[Any], ...] = (reader, sender, lost, *ends)
        is_handed_over = False
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while arrival := await self._until_back(session, reader, sender, lost, ends):
                self._change_socket(arrival)
                reader = asyncio.create_task(self._read(session))
                sender = asyncio.create_task(self._outbox.drain())
                lost = asyncio.create_task(self._outbox.until_lost())
                tasks = (reader, sender, lost, *ends)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if idle.done() and not idle.cancelled():
                self._metrics.errors.labels(IdleSessionError.code).inc()
                session.part(idle.result())
            elif over.done():
                pass
            elif drained.done() or (self._is_away and self._parts.drain.began.is_set()):
                is_handed_over = await self._hand_over(session, reader)
                if not is_handed_over:
                    session.part(DrainingError("The server is about to stop."))
            if any(task.done() and not task.cancelled() for task in (drained, idle, over)):
                self._outbox.close()  # pending events are still sent
                ended = asyncio.FIRST_COMPLETED
                await asyncio.wait({sender, lost}, timeout=_CLOSE_GRACE_S, return_when=ended)
        finally:
            for task in tasks:
                task.cancel()
            await close_all(session.close, partial(_end, *tasks))
        if is_handed_over:
            self._metrics.clients_dropped.labels("handed_over").inc()
            log.info("session_handed_over session=%s", self.session_id)
            await self._close(CLOSE_SERVICE_RESTART, RESUME)
        elif not idle.cancelled():
            self._metrics.clients_dropped.labels("idle").inc()
            log.info("client_idle session=%s", self.session_id)
            await self._close(CLOSE_NORMAL, IdleSessionError.code)
        elif not over.cancelled():
            await self._close(*over.result())
        elif not drained.cancelled():
            self._metrics.clients_dropped.labels("draining").inc()
            await self._close(CLOSE_SERVICE_RESTART, DrainingError.code)
        elif not lost.cancelled():
            self._metrics.clients_dropped.labels(lost.result()).inc()
            log.warning("client_dropped session=%s reason=%s", self.session_id, lost.result())
            await self._close(CLOSE_POLICY_VIOLATION, "client does not read")
        elif not sender.cancelled() and (error := sender.exception()):
            # An on_sent callback has failed, which is a bug; failures of the network end the
            # sender without an exception.
            self._metrics.errors.labels(internal_error().code).inc()
            log.error("sender_crashed session=%s", self.session_id, exc_info=error)
            await self._close(CLOSE_INTERNAL_ERROR, internal_error().code)

    async def _until_back(
        self,
        session: CallSession,
        reader: asyncio.Task[None],
        sender: asyncio.Task[None],
        lost: asyncio.Task[str],
        ends: tuple[asyncio.Task[Any], ...],
    ) -> Arrival | None:
        """Wait for another socket of a resumable call.

        Returns:
            None: the call ends.
        """
        resumption = session.resumption
        if resumption is None or any(task.done() for task in ends):
            return None
        if not resumption.has_arrival and not await self._is_lost(reader, sender, lost):
            return None
        await self._stop_reading(reader)
        await _end(reader, sender, lost)
        self._is_away = True
        log.info("socket_lost session=%s", self.session_id)
        back = asyncio.create_task(resumption.arrival())
        drains = asyncio.create_task(self._parts.drain.began.wait())
        expiry = self._parts.clock.sleep(self._parts.config.limits.resume_s)
        waits = (back, drains, asyncio.create_task(expiry))
        try:
            await asyncio.wait((*waits, *ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(*waits)
        outcome = "expired" if back.cancelled() else "resumed"
        self._metrics.sockets_lost.labels(outcome).inc()
        log.info("socket_%s session=%s", outcome, self.session_id)
        if back.cancelled():
            return None
        arrival, self._is_away = back.result(), False
        resumption.go_on(arrival, self._n_read)
        return arrival

    async def _stop_reading(self, reader: asyncio.Task[None]) -> None:
        self._reads = False
        if self._is_handling:
            await asyncio.wait({reader})  # no event is handled in part

    async def _hand_over(self, session: CallSession, reader: asyncio.Task[None]) -> bool:
        """Returns whether another gateway can have the call, all of which is written then."""
        if session.resumption is None:
            return False
        await self._stop_reading(reader)
        return await session.resumption.hand_over()

    async def _is_lost(
        self, reader: asyncio.Task[None], sender: asyncio.Task[None], lost: asyncio.Task[str]
    ) -> bool:
        """Whether the network has failed: neither side has closed the socket."""
        if lost.done():
            return lost.result() == STALLED
        if sender.done() and sender.exception():
            return False
        # Frames that came before the end of the socket are read first.
        await asyncio.wait({reader}, timeout=_CLOSE_GRACE_S)
        return not reader.done() or self._wire.is_lost

    def _change_socket(self, arrival: Arrival) -> None:
        background(self._let_go(self._wire, self._left), "socket that was lost")
        self._wire, self._left = arrival.wire, arrival.left
        self._received_at_s = self._parts.clock.now_s()
        self._reads = True

    async def _let_go(self, wire: Wire, left: asyncio.Event) -> None:
        await self._close(CLOSE_NORMAL, "resumed", wire)
        left.set()

    async def _until_drained(self, session: CallSession) -> None:
        """Wait until the server is about to stop and this session's last response is over."""
        drain = self._parts.drain
        await drain.began.wait()
        while session.at_work and not drain.over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_POLL_S):
                    await drain.over.wait()

    async def _until_idle(self, session: CallSession) -> IdleSessionError:
        """Wait until the client has sent nothing for too long and no response runs or plays."""
        clock, limit_s = self._parts.clock, self._parts.config.limits.idle_session_s
        while not limit_s:
            await asyncio.Event().wait()
        while (left_s := self._received_at_s + limit_s - clock.now_s()) > 0 or session.at_work:
            await clock.sleep(max(left_s, min(_IDLE_POLL_S, limit_s)))
        return IdleSessionError(f"The client sent nothing for {limit_s:g} s.")

    async def _read(self, session: CallSession) -> None:
        wire = self._wire
        while self._reads:
            frame = await wire.receive()
            self._received_at_s = self._parts.clock.now_s()
            if frame is None:
                return
            self._is_handling = True
            await self._handle(frame, session)
            self._is_handling = False
            self._n_read += 1
            session.read(self._n_read)

    async def _handle(self, frame: str | bytes, session: CallSession) -> None:
        try:
            if isinstance(frame, bytes):
                await session.hear(frame)
            else:
                await session.handle(self._text(frame))
        except LiveError as error:
            self._tell(error, frame)
        except Exception:
            # Process edge towards one client: a bug ends this event, not the session.
            log.exception("event_crashed session=%s", self.session_id)
            self._tell(internal_error(), frame)

    def _text(self, frame: str) -> str:
        max_bytes = self._parts.config.inputs.max_frame_bytes
        if len(frame) > max_bytes:
            raise ClientEventError(
                f"Event too large: at most {max_bytes} bytes.", code="event_too_large"
            )
        return frame

    def _tell(self, error: LiveError, frame: str | bytes | None = None) -> None:
        self._metrics.errors.labels(error.code).inc()
        if isinstance(frame, bytes) or error.code in _UNREADABLE:
            frame = None
        self._protocol.refuse(self._outbox, error, frame)

    async def _close_session(self, voice_session: VoiceSession) -> None:
        try:
            await voice_session.close()
        except Exception:
            log.exception("session_close_crashed session=%s", self.session_id)

    async def _close(self, code: int, reason: str, wire: Wire | None = None) -> None:
        """wire: None: the one that the call has now."""
        try:
            async with asyncio.timeout(_CLOSE_GRACE_S):
                await (wire or self._wire).close(code, reason)
        except Exception as error:  # of any type that a socket raises; the client has gone
            log.debug("close_failed session=%s error=%r", self.session_id, error)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for them. Their exceptions, such as a socket's, are dropped."""
    for task in tasks:
        task.cancel()
    # Not gather(): it would replace the exception by which this task itself is cancelled.
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
