"""More sockets of a running Live session: they see its events and may send their own.

In: what the session broadcasts; client events of each sideband. Out: text frames; the effect of the
events on the session.
Owner: one Sideband per socket, one LiveSessions per server, in which it finds its session. It ends
with the session; the session lasts without it.
"""

import asyncio
import logging
from typing import Any, Protocol

from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.wire import Wire
from sglang_live.gateway.errors import (
    CLOSE_POLICY_VIOLATION,
    ClientEventError,
    internal_error,
)
from sglang_live.gateway.live.broadcast import Broadcast
from sglang_live.gateway.live.events import event_id_of
from sglang_live.gateway.live.stream import error_fields
from sglang_live.gateway.parts import GatewayParts

log = logging.getLogger(__name__)

_CLOSE_GRACE_S = 0.5


class SessionNotFoundError(BadInputError):
    code = "session_not_found"
    http_status = 404


class Attachable(Protocol):
    """
    owner: of the key of its client.
    """

    owner: str
    broadcast: Broadcast

    def show(self, outbox: Outbox) -> None:
        """Tell a new sideband what the session is."""

    async def handle_aside(self, frame: str) -> None:
        """The effect of a sideband's event. Raises LiveError if it is refused."""

    def hang_up(self) -> None:
        """End it, as session.close does."""

    async def until_gone(self) -> tuple[int, str]:
        """Wait for the end of the session. Returns code and reason to close the socket."""
        ...


class LiveSessions:
    """Those that have started, by id."""

    def __init__(self) -> None:
        self._running: dict[str, Attachable] = {}

    def add(self, session_id: str, session: Attachable) -> None:
        self._running[session_id] = session

    def remove(self, session_id: str) -> None:
        self._running.pop(session_id, None)

    def find(self, session_id: str, owner: str) -> Attachable:
        """
        Raises:
            SessionNotFoundError: it does not run, or its client has another key.
        """
        session = self._running.get(session_id)
        if session is None or session.owner != owner:
            raise SessionNotFoundError("There is no such session.")
        return session


class Sideband:
    def __init__(self, wire: Wire, parts: GatewayParts, session: Attachable):
        self._wire = wire
        self._parts = parts
        self._session = session
        self._outbox = Outbox(wire.send, parts.config.sessions.send_buffer_bytes)

    async def run(self) -> None:
        """Serve until the session ends or the client leaves. Its faults raise nothing."""
        with self._session.broadcast.to(self._outbox):
            self._session.show(self._outbox)
            sender = asyncio.create_task(self._outbox.drain())
            reader = asyncio.create_task(self._read())
            lost = asyncio.create_task(self._outbox.until_lost())
            gone = asyncio.create_task(self._session.until_gone())
            tasks: tuple[asyncio.Task[Any], ...] = (sender, reader, lost, gone)
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self._outbox.close()  # pending events are still sent
                if gone.done():
                    await asyncio.wait({sender}, timeout=_CLOSE_GRACE_S)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        if not gone.cancelled():
            await self._close(*gone.result())
        elif not lost.cancelled():
            self._parts.metrics.clients_dropped.labels(lost.result()).inc()
            await self._close(CLOSE_POLICY_VIOLATION, "client does not read")

    async def _read(self) -> None:
        while (frame := await self._wire.receive()) is not None:
            try:
                await self._handle(frame)
            except LiveError as error:
                self._tell(error, frame)
            except Exception:
                log.exception("sideband_event_crashed")
                self._tell(internal_error(), frame)

    async def _handle(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes):
            raise ClientEventError("Binary frames hold no events.", code="invalid_event")
        if len(frame) > (most := self._parts.config.inputs.max_frame_bytes):
            raise ClientEventError(
                f"Event too large: at most {most} bytes.", code="event_too_large"
            )
        await self._session.handle_aside(frame)

    def _tell(self, error: LiveError, frame: str | bytes) -> None:
        self._parts.metrics.errors.labels(error.code).inc()
        is_readable = isinstance(frame, str) and error.code != "event_too_large"
        event_id = event_id_of(frame) if isinstance(frame, str) and is_readable else None
        self._outbox.emit("error", **error_fields(error, event_id))

    async def _close(self, code: int, reason: str) -> None:
        try:
            async with asyncio.timeout(_CLOSE_GRACE_S):
                await self._wire.close(code, reason)
        except Exception as error:  # of any type that a socket raises; the client has gone
            log.debug("close_failed error=%r", error)
