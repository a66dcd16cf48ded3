"""One realtime connection, from the first event to the last.

In: text frames. Out: text frames.
Owner: one RealtimeConnection per socket. Three tasks: reading (strictly in order), sending,
and the responses; reading never waits for an answer, so that a caller can always interrupt.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from sglang_live.clock import Clock
from sglang_live.errors import LiveError
from sglang_live.gateway.caller_turns import CallerTurns
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.conversation import Conversation
from sglang_live.gateway.conversation_events import ConversationEvents
from sglang_live.gateway.event_error import ClientEventError, error_body, internal_error
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.outbox import Outbox
from sglang_live.gateway.realtime_events import (
    AnyClientEvent,
    AudioAppend,
    AudioClear,
    AudioCommit,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    OutputAudioClear,
    ResponseCancel,
    ResponseCreate,
    SessionUpdate,
    event_id_of,
    parse_client_event,
)
from sglang_live.gateway.response_plan import plan_response
from sglang_live.gateway.responses import Responses
from sglang_live.gateway.session_config import initial_config, update_config
from sglang_live.interaction.silero import SpeechModel
from sglang_live.orchestrator.session import Orchestrator, VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

CLOSE_POLICY_VIOLATION = 1008
CLOSE_INTERNAL_ERROR = 1011
CLOSE_TRY_AGAIN_LATER = 1013

# A client that does not read cannot take a close frame either; do not wait for it for long.
_CLOSE_GRACE_S = 0.5


class Wire(Protocol):
    """The socket, as the connection needs it."""

    async def receive(self) -> str | bytes | None:
        """Next frame, bytes for a binary one, None when the client is gone."""
        ...

    async def send(self, frame: str) -> None: ...

    async def close(self, code: int, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeServices:
    """What all connections of a process share."""

    orchestrator: Orchestrator
    config: GatewayConfig
    speech_model: SpeechModel
    clock: Clock
    metrics: GatewayMetrics


class RealtimeConnection:
    def __init__(self, wire: Wire, services: RealtimeServices):
        self.session_id = new_id("sess")
        self._wire = wire
        self._services = services
        self._metrics = services.metrics
        self._outbox = Outbox(wire.send, services.config.send_buffer_bytes)
        self._emit = self._outbox.emit
        orchestrator = services.orchestrator
        default_voice = orchestrator.voices[0] if orchestrator.voices else "default"
        self._defaults = initial_config(orchestrator.model_name, default_voice, services.config)
        self._config = self._defaults

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
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        await self._close(code, error.code)

    async def _serve(self, session: VoiceSession, sender: asyncio.Task[None]) -> None:
        services = self._services
        self._conversation = Conversation(services.config.max_conversation_bytes)
        self._responses = Responses(
            session=session,
            conversation=self._conversation,
            emit=self._emit,
            voices=services.orchestrator.voices,
            clock=services.clock,
            metrics=self._metrics,
            max_side_responses=services.config.max_side_responses,
        )
        max_bytes = services.config.max_append_bytes
        self._items = ConversationEvents(
            self._conversation, self._emit, self._metrics, max_bytes=max_bytes
        )
        self._turns = CallerTurns(
            config=self._config,
            gateway=services.config,
            items=self._items,
            responses=self._responses,
            emit=self._emit,
            speech_model=services.speech_model,
            clock=services.clock,
            metrics=self._metrics,
        )
        self._emit("session.created", session=self._config.to_wire(self.session_id))
        await self._until_over(sender)

    async def _until_over(self, sender: asyncio.Task[None]) -> None:
        reader = asyncio.create_task(self._read())
        overflow = asyncio.create_task(self._outbox.overflowed.wait())
        try:
            await asyncio.wait({reader, sender, overflow}, return_when=asyncio.FIRST_COMPLETED)
            if overflow.done():
                self._metrics.clients_dropped.labels("slow_reader").inc()
                log.warning("client_dropped session=%s reason=slow_reader", self.session_id)
        finally:
            for task in (reader, sender, overflow):
                task.cancel()
            self._turns.close()
            await self._responses.close()
            # The socket's own errors: how it ended does not matter any more.
            await asyncio.gather(reader, sender, overflow, return_exceptions=True)
        if self._outbox.overflowed.is_set():
            await self._close(CLOSE_POLICY_VIOLATION, "client does not read")

    async def _read(self) -> None:
        while True:
            frame = await self._wire.receive()
            if frame is None:
                return
            await self._handle(frame)

    async def _handle(self, frame: str | bytes) -> None:
        event_id = None
        try:
            event = self._parse(frame)
            event_id = event.event_id
            await self._dispatch(event)
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

    async def _dispatch(self, event: AnyClientEvent) -> None:
        match event:
            case AudioAppend():
                await self._turns.append(event)
            case AudioCommit():
                self._turns.commit()
            case AudioClear():
                self._turns.clear()
            case ItemCreate():
                self._items.create(event, self._config.input_format)
            case ItemDelete():
                self._items.delete(event)
            case ItemRetrieve():
                self._items.retrieve(event, self._config.input_format)
            case ItemTruncate():
                self._items.truncate(event)
            case ResponseCreate():
                self._create_response(event)
            case ResponseCancel():
                self._responses.cancel(event.response_id)
            case SessionUpdate():
                self._update_session(event)
            case OutputAudioClear():
                raise ClientEventError(
                    "output_audio_buffer.clear exists for WebRTC and SIP only.", param="type"
                )

    def _create_response(self, event: ResponseCreate) -> None:
        plan = plan_response(
            event.response,
            self._config,
            self._conversation,
            max_audio_bytes=self._services.config.max_append_bytes,
            now_s=self._services.clock.now_s(),
        )
        self._responses.create(plan)

    def _update_session(self, event: SessionUpdate) -> None:
        self._config = update_config(
            self._config,
            event.session,
            defaults=self._defaults,
            voice_locked=self._responses.has_spoken,
        )
        self._emit("session.updated", session=self._config.to_wire(self.session_id))
        self._turns.configure(self._config)

    def _emit_error(self, error: LiveError, event_id: str | None) -> None:
        self._metrics.errors.labels(error.code).inc()
        self._emit("error", error={**error_body(error), "event_id": event_id})

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


def _readable_event_id(frame: str | bytes, error: LiveError) -> str | None:
    if isinstance(frame, bytes) or error.code in ("invalid_json", "event_too_large"):
        return None
    return event_id_of(frame)
