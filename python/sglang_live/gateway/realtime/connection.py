"""One realtime connection, from the first frame to the last.

In: text frames. Out: text frames.
Owner: one RealtimeConnection per socket. Its tasks read (strictly in order), send, and run
responses. Reading never waits for a response, so that a user can always interrupt.
"""

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect

from sglang_live.aio import close_all
from sglang_live.errors import LiveError
from sglang_live.gateway.auth import ANONYMOUS, choose_subprotocol, offered_keys
from sglang_live.gateway.draining import CLOSE_SERVICE_RESTART, DrainingError
from sglang_live.gateway.errors import (
    CLOSE_POLICY_VIOLATION,
    ClientEventError,
    InvalidKeyError,
    NoLanguageModelError,
    cut,
    error_body,
    internal_error,
    refuse_handshake,
)
from sglang_live.gateway.model import check_model
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.rate_limits import RateLimitError
from sglang_live.gateway.realtime.client_secrets import ClientSecrets
from sglang_live.gateway.realtime.events import (
    AnyClientEvent,
    SessionForm,
    event_id_of,
    parse_client_event,
)
from sglang_live.gateway.realtime.outbox import Outbox
from sglang_live.gateway.realtime.session import RealtimeSession
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import VoiceSession
from sglang_live.telemetry.log_context import set_log_ids

log = logging.getLogger(__name__)

CLOSE_NORMAL = 1000
CLOSE_INTERNAL_ERROR = 1011
CLOSE_TRY_AGAIN_LATER = 1013

# A client that does not read cannot receive a close frame either, so the wait for it is short.
_CLOSE_GRACE_S = 0.5
# Playback ends by the clock, without an event, so its end is polled at these intervals.
_IDLE_POLL_S = 1.0
_DRAIN_POLL_S = 0.1


class IdleSessionError(LiveError):
    code = "session_idle"
    http_status = 408


class Wire(Protocol):
    """A socket of text frames."""

    async def receive(self) -> str | bytes | None:
        """The next frame; bytes for a binary frame, None after the client has left."""
        ...

    async def send(self, frame: str) -> None: ...

    async def close(self, code: int, reason: str) -> None: ...


class RealtimeConnection:
    """
    preset: settings of the session from its client secret; None: the defaults.
    owner: owner of the client's key.
    """

    def __init__(
        self,
        wire: Wire,
        parts: GatewayParts,
        preset: SessionForm | None = None,
        owner: str = ANONYMOUS,
    ):
        self._owner = owner
        self._received_at_s = parts.clock.now_s()
        self.session_id = new_id("sess")
        self._preset = preset
        self._wire = wire
        self._parts = parts
        self._metrics = parts.metrics
        self._outbox = Outbox(wire.send, parts.config.sessions.send_buffer_bytes)

    async def run(self) -> None:
        """Serve until the client leaves. Faults of a client or stage raise nothing."""
        set_log_ids(session=self.session_id)
        sender = asyncio.create_task(self._outbox.drain())
        try:
            self._parts.loop_lag.check()
            voice_session = await self._parts.orchestrator.open_session(self.session_id)
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

    async def _serve(self, voice_session: VoiceSession, sender: asyncio.Task[None]) -> None:
        session = RealtimeSession(
            voice_session, self._outbox, self._parts, self._preset, self._owner
        )
        session.greet()
        reader = asyncio.create_task(self._read(session))
        lost = asyncio.create_task(self._outbox.until_lost())
        drained = asyncio.create_task(self._until_drained(session))
        idle = asyncio.create_task(self._until_idle(session))
        tasks: tuple[asyncio.Task[Any], ...] = (reader, sender, lost, drained, idle)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if idle.done() and not idle.cancelled():
                self._emit_error(idle.result(), None)
            if any(task.done() and not task.cancelled() for task in (drained, idle)):
                self._outbox.close()  # pending events are still sent
                await asyncio.wait({sender, lost}, timeout=_CLOSE_GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            await close_all(session.close, partial(_end, *tasks))
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
            # An on_sent callback has failed, which is a bug; failures of the network end the
            # sender without an exception.
            self._metrics.errors.labels(internal_error().code).inc()
            log.error("sender_crashed session=%s", self.session_id, exc_info=error)
            await self._close(CLOSE_INTERNAL_ERROR, internal_error().code)

    async def _until_drained(self, session: RealtimeSession) -> None:
        """Wait until the server is about to stop and this session's last response is over."""
        drain = self._parts.drain
        await drain.began.wait()
        while session.at_work and not drain.over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(drain.over.wait(), _DRAIN_POLL_S)

    async def _until_idle(self, session: RealtimeSession) -> IdleSessionError:
        """Wait until the client has sent nothing for too long and no response runs or plays."""
        clock, limit_s = self._parts.clock, self._parts.config.limits.idle_session_s
        while not limit_s:
            await asyncio.Event().wait()
        while (left_s := self._received_at_s + limit_s - clock.now_s()) > 0 or session.at_work:
            await clock.sleep(max(left_s, min(_IDLE_POLL_S, limit_s)))
        return IdleSessionError(f"The client sent nothing for {limit_s:g} s.")

    async def _read(self, session: RealtimeSession) -> None:
        while True:
            frame = await self._wire.receive()
            self._received_at_s = self._parts.clock.now_s()
            if frame is None:
                return
            await self._handle(frame, session)

    async def _handle(self, frame: str | bytes, session: RealtimeSession) -> None:
        event_id = None
        try:
            event = self._parse(frame)
            event_id = event.event_id
            await session.handle(event)
        except LiveError as error:
            self._emit_error(error, event_id or _readable_event_id(frame, error))
        except Exception:
            # Process edge towards one client: a bug ends this event, not the session.
            log.exception("event_crashed session=%s", self.session_id)
            self._emit_error(internal_error(), event_id)

    def _parse(self, frame: str | bytes) -> AnyClientEvent:
        if isinstance(frame, bytes):
            raise ClientEventError("Binary frames hold no events.", code="invalid_event")
        max_bytes = self._parts.config.inputs.max_frame_bytes
        if len(frame) > max_bytes:
            raise ClientEventError(
                f"Event too large: at most {max_bytes} bytes.", code="event_too_large"
            )
        return parse_client_event(frame)

    def _emit_error(self, error: LiveError, event_id: str | None) -> None:
        self._metrics.errors.labels(error.code).inc()
        self._outbox.emit("error", error={**error_body(error), "event_id": event_id})

    async def _close_session(self, voice_session: VoiceSession) -> None:
        try:
            await voice_session.close()
        except Exception:
            log.exception("session_close_crashed session=%s", self.session_id)

    async def _close(self, code: int, reason: str) -> None:
        try:
            await asyncio.wait_for(self._wire.close(code, reason), _CLOSE_GRACE_S)
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


def _readable_event_id(frame: str | bytes, error: LiveError) -> str | None:
    if isinstance(frame, bytes) or error.code in ("invalid_json", "event_too_large"):
        return None
    return event_id_of(frame)


# --- the /v1/realtime route: checks of a handshake, and the socket as a Wire ---


_QUERY = ("model", "intent", "call_id")
_BETA_HEADER, _BETA_SUBPROTOCOL = "realtime=v1", "openai-beta.realtime-v1"


class TooManySessionsError(RateLimitError):
    """One key, or one client secret, has its limit of sessions open."""


class SocketWire:
    """A Starlette socket as a Wire."""

    def __init__(self, socket: WebSocket):
        self._socket = socket

    async def receive(self) -> str | bytes | None:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text = message.get("text")
        return text if text is not None else message.get("bytes") or b""

    async def send(self, frame: str) -> None:
        await self._socket.send_text(frame)

    async def close(self, code: int, reason: str) -> None:
        await self._socket.close(code, reason)


class RealtimeRoute:
    def __init__(self, parts: GatewayParts, secrets: ClientSecrets):
        self._parts = parts
        self._keys = parts.keys
        self._secrets = secrets
        self._open: Counter[str] = Counter()  # sessions by key, and by client secret

    async def __call__(self, socket: WebSocket) -> None:
        offered = socket.scope.get("subprotocols", [])
        secret = self._secrets.find(offered_keys(socket.headers, offered))
        if secret is None and not self._keys.allow(socket.headers, offered):
            await self._deny(socket)
            return
        owner = secret.owner if secret else self._keys.owner(socket.headers, offered)
        await socket.accept(choose_subprotocol(offered))
        holders = [owner, secret.value] if secret else [owner]
        refusal = self._refusal(socket, holders)
        try:
            if refusal:
                self._parts.metrics.sessions_refused.labels(refusal["code"]).inc()
                await _refuse(socket, refusal)
            else:
                await self._serve(socket, holders, secret.session if secret else None)
        except WebSocketDisconnect:
            pass  # the client left before the refusal was sent

    async def _serve(
        self, socket: WebSocket, holders: list[str], preset: SessionForm | None
    ) -> None:
        """holders: the key's owner, then the client secret if there is one."""
        self._open.update(holders)
        try:
            wire = SocketWire(socket)
            await RealtimeConnection(wire, self._parts, preset, holders[0]).run()
        finally:
            self._open.subtract(holders)
            self._open += Counter()  # removes counts of zero

    def _refusal(self, socket: WebSocket, holders: list[str]) -> dict[str, Any] | None:
        try:
            if not self._parts.config.model.has_language_model:
                raise NoLanguageModelError
            self._parts.tiers.check_heard(holders[0])
            self._check_room(*holders)
            _check_shape(socket)
            check_model(self._parts.orchestrator.model_name, socket.query_params.get("model"))
        except LiveError as error:
            return error_body(error)
        return None

    def _check_room(self, owner: str, secret: str | None = None) -> None:
        limits = self._parts.config.limits
        limit = limits.max_sessions_per_key
        if limit is not None and self._open[owner] >= limit:
            raise TooManySessionsError(f"This key has {limit} sessions open, its limit.")
        most = limits.max_sessions_per_secret
        if secret is not None and self._open[secret] >= most:
            raise TooManySessionsError(f"This client secret has {most} sessions open, its limit.")

    async def _deny(self, socket: WebSocket) -> None:
        self._parts.metrics.sessions_refused.labels(InvalidKeyError.code).inc()
        # OpenAI refuses the handshake with 401; clients then stop trying.
        await refuse_handshake(socket, InvalidKeyError())


def _check_shape(socket: WebSocket) -> None:
    """Raises ClientEventError if the handshake requests the beta or something unsupported."""
    offered = socket.scope.get("subprotocols", [])
    if _BETA_HEADER in socket.headers.get("openai-beta", "") or _BETA_SUBPROTOCOL in offered:
        raise ClientEventError(
            "The beta's events are not supported, only those of the general release: leave out "
            "the header OpenAI-Beta.",
            code="beta_api_shape_disabled",
            param="OpenAI-Beta",
        )
    for name in socket.query_params:
        if name not in _QUERY:
            raise ClientEventError(
                f"Unknown parameter in the URL: {cut(name)!r}. Use session.update for settings.",
                code="unknown_parameter",
                param=name,
            )
    if "call_id" in socket.query_params:
        raise ClientEventError("WebRTC and SIP calls are not supported.", param="call_id")
    if (intent := socket.query_params.get("intent")) is not None:
        raise ClientEventError(
            f"Sessions for {cut(intent)!r} are not supported, only conversations.",
            code="unsupported_session_type",
            param="intent",
        )


async def _refuse(socket: WebSocket, error: dict[str, Any]) -> None:
    event = {"type": "error", "event_id": new_id("event"), "error": {**error, "event_id": None}}
    await socket.send_text(orjson.dumps(event).decode())
    later = error["code"] == RateLimitError.code
    code = CLOSE_TRY_AGAIN_LATER if later else CLOSE_POLICY_VIOLATION
    await socket.close(code, error["code"])
