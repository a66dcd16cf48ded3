"""A Live session that has started: the effect of each client event, and its time.

In: client events, in order. Out: server events.
Owner: one ActiveSession per connection. Time passes by ticks of the server's clock, whatever the
client sends; a tick that comes late is followed by the next one at its own time.
"""

import asyncio
import time
from collections.abc import Callable

from sglang_live.aio import background, close_all
from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import PCM, WireFormat, decode_base64
from sglang_live.gateway.call.wire import CLOSE_INTERNAL_ERROR, CLOSE_NORMAL
from sglang_live.gateway.errors import ClientEventError, internal_error
from sglang_live.gateway.live.backend import Backend
from sglang_live.gateway.live.broadcast import Broadcast
from sglang_live.gateway.live.decisions import Decisions
from sglang_live.gateway.live.ear import Ear
from sglang_live.gateway.live.events import (
    AnyClientEvent,
    Append,
    AudioAppend,
    CommentaryAppend,
    DecisionCreate,
    DecisionItemCreate,
    DecisionItemDelete,
    DtmfSend,
    FixturePlay,
    InstructionsAppend,
    Mute,
    ResponseCreate,
    ResponseItemCreate,
    SessionClose,
    SessionStart,
    SessionUpdate,
    ThinkingAppend,
    Unmute,
)
from sglang_live.gateway.live.session_config import LiveConfig, update_config
from sglang_live.gateway.live.stream import Stream, echo, error_fields
from sglang_live.gateway.live.voice import AppendKind, Voice
from sglang_live.gateway.parts import GatewayParts

# Of a session: the protocol wants it to have an end.
_MOST_S = 7 * 24 * 3600
_MOST_FIXTURE_MS = 30_000
_KINDS: dict[type[Append], AppendKind] = {
    InstructionsAppend: "instructions",
    ThinkingAppend: "thinking",
    CommentaryAppend: "commentary",
}


class ActiveSession:
    def __init__(
        self,
        session_id: str,
        config: LiveConfig,
        voice: Voice,
        stream: Stream,
        outbox: Broadcast,
        parts: GatewayParts,
        *,
        on_over: Callable[[int, str], None],
        worker: Backend | Decisions | None = None,
    ):
        """
        Args:
            on_over: called with code and reason to close the socket.
        """
        self.voice = voice
        self._worker = worker
        self._session_id = session_id
        self._config = config
        self._stream = stream
        self._outbox = outbox
        self._parts = parts
        self._clock = parts.clock
        self._on_over = on_over
        self._ear = Ear(config.call.input_format, voice.hear, fills=voice.hears_silence)
        self._expires_at = int(time.time()) + _MOST_S
        self._tasks: list[asyncio.Task[LiveError | None]] = []

    @property
    def at_work(self) -> bool:
        """Whether it speaks, or works."""
        return self.voice.at_work or (self._worker is not None and self._worker.at_work)

    def start(self, event_id: str | None) -> None:
        self._outbox.emit("session.started", session=self.resource(), **echo(event_id))
        self._tasks = [
            background(self._tick(), "live ticks"),
            background(self._ear.run(), "live ear"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    async def handle(self, event: AnyClientEvent) -> None:
        """Raises LiveError if the event is refused; it then has no effect."""
        match event:
            case AudioAppend():
                self.hear(self._audio(event.audio, self._config.call.input_format))
            case Mute():
                self._ear.muted = True
                self._outbox.emit("session.input_audio.muted", **echo(event.event_id))
            case Unmute():
                self._ear.muted = False
                self._outbox.emit("session.input_audio.unmuted", **echo(event.event_id))
            case Append():
                await self._append(event)
            case FixturePlay():
                self._play(self._audio(event.audio, PCM), event.event_id)
            case SessionUpdate():
                self._config = update_config(self._config, event.session, self._parts)
                self.voice.acknowledgement_delay_ms = self._config.acknowledgement_delay_ms
                self._settle()
                self._outbox.emit(
                    "session.updated", session=self.resource(), **echo(event.event_id)
                )
            case ResponseItemCreate() if isinstance(self._worker, Backend):
                self._worker.add_item(event.item)
            case ResponseCreate() if isinstance(self._worker, Backend):
                self._worker.create()
            case DecisionCreate() if isinstance(self._worker, Decisions):
                self._worker.create(event.event_id)
            case DecisionItemCreate() if isinstance(self._worker, Decisions):
                item = self._worker.add_item(event.item)
                self._outbox.emit("decision.item.created", item=item, **echo(event.event_id))
            case DecisionItemDelete() if isinstance(self._worker, Decisions):
                self._worker.delete_item(event.item_id)
                self._outbox.emit(
                    "decision.item.deleted", item_id=event.item_id, **echo(event.event_id)
                )
            case SessionClose():
                self.finish("close_requested", event.event_id)
            case SessionStart():
                raise ClientEventError("The session has started.", code="session_already_started")
            case _:
                raise _unserved(event)

    def hear(self, raw: bytes) -> None:
        """The user's next audio, in whole samples. Raises BufferFullError."""
        self._ear.push(raw)
        self._outbox.reflect(raw, self._config.call.input_format)

    def finish(self, reason: str, event_id: str | None = None) -> None:
        """Report the end of the session. reason: of the protocol."""
        self._end_tasks()
        if self._worker is not None:
            self._worker.stop()
        self._stream.end()
        self._outbox.emit(
            "session.closed",
            reason=reason,
            session=self.resource(),
            usage=self._stream.usage,
            **echo(event_id),
        )
        self._on_over(CLOSE_NORMAL, reason)

    async def close(self) -> None:
        closes = () if self._worker is None else (self._worker.close,)
        await close_all(self._end_tasks, *closes, self.voice.close)

    def _settle(self) -> None:
        """Give the worker its settings."""
        if isinstance(self._worker, Backend) and self._config.backend is not None:
            self._worker.settings = self._config.backend
        elif isinstance(self._worker, Decisions) and self._config.decisions is not None:
            self._worker.settings = self._config.decisions

    async def _append(self, event: Append) -> None:
        if self._stream.plays_fixture:
            raise ClientEventError("A fixture is playing.", code="fixture_active", param="type")
        if self._worker is not None and event.delegation_id is not None:
            raise ClientEventError(
                "This session does not delegate to the client: delegation_id is null.",
                param="delegation_id",
            )
        kind = _KINDS[type(event)]
        await self.voice.append(kind, event.content, event.delegation_id)
        self._stream.acknowledge(kind, event.event_id)

    def _play(self, pcm: bytes, event_id: str | None) -> None:
        if self._stream.plays_fixture:
            raise ClientEventError("A fixture is playing.", code="fixture_active", param="type")
        fault = ""
        if not pcm:
            fault = "It is empty."
        elif pcm.startswith(b"RIFF"):
            fault = "It has the header of a file; PCM has none."
        elif PCM.duration_ms(len(pcm)) > _MOST_FIXTURE_MS:
            fault = f"It is longer than {_MOST_FIXTURE_MS // 1000} s."
        if fault:
            raise ClientEventError(fault, code="invalid_audio", param="audio")
        self.voice.stop_speaking()
        self._ear.deaf = True
        self._stream.play(pcm, event_id)

    def _audio(self, text: str, form: WireFormat) -> bytes:
        try:
            most = self._parts.config.inputs.max_append_bytes
            return decode_base64(text, form, max_bytes=most, param="audio")
        except ClientEventError as error:
            raise ClientEventError(str(error), code="invalid_audio", param="audio") from None

    async def _tick(self) -> LiveError | None:
        """Returns why there is no voice any more; None at the session's latest end."""
        began_s = self._clock.now_s()
        while self._stream.now_ms < 1000 * _MOST_S:
            self._ear.deaf = self._stream.plays_fixture
            self._ear.pass_time(self._stream.now_ms)
            try:
                self._stream.tick()
            except LiveError as error:
                return error
            due_s = began_s + self._stream.now_ms / 1000
            await self._clock.sleep(due_s - self._clock.now_s())
        return None

    def _on_task_done(self, task: asyncio.Task[LiveError | None]) -> None:
        if task.cancelled():
            return
        # An exception is a bug, which is logged: without ticks, or deaf, the session is dead.
        error = internal_error() if task.exception() else task.result()
        if error is None:
            self.finish("expired")
            return
        self._parts.metrics.errors.labels(error.code).inc()
        self._outbox.emit("error", **error_fields(error, None))
        self._on_over(CLOSE_INTERNAL_ERROR, error.code)

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def resource(self) -> dict[str, object]:
        """What the session is, in the protocol's form."""
        return self._config.to_json(self._session_id, self._expires_at)


def _unserved(event: AnyClientEvent) -> ClientEventError:
    match event:
        case ResponseCreate() | ResponseItemCreate():
            why = "This session does not delegate to responses."
        case DtmfSend():
            why = "There are no keys on a WebSocket."
        case _:
            why = "This session does not delegate to decisions."
    return ClientEventError(why, code="unsupported_event", param="type")
