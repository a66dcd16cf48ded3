"""One open session of the Realtime protocol: the effect of each client event.

In: client events, in order. Out: server events; what they ask of the call.
Owner: one RealtimeSession per connection.
"""

import asyncio

from msgspec import UNSET

from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import decode_base64
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.call.call import Call
from sglang_live.gateway.call.link import IdleSessionError
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.errors import ClientEventError, error_body
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import (
    AudioAppend,
    AudioClear,
    AudioCommit,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    OutputAudioClear,
    PlaybackAck,
    ResponseCancel,
    ResponseCreate,
    SessionForm,
    SessionUpdate,
    parse_client_event,
)
from sglang_live.gateway.realtime.item_events import ItemEvents
from sglang_live.gateway.realtime.response_plan import check_length, plan_response
from sglang_live.gateway.realtime.server_events import RealtimePort
from sglang_live.gateway.realtime.session_config import config_json, first_config, update_config
from sglang_live.orchestrator.sessions import VoiceSession


class RealtimeSession:
    """
    preset: settings of the session from its client secret; None: the defaults.
    owner: owner of the client's key, for limits.
    """

    def __init__(
        self,
        session: VoiceSession,
        outbox: Outbox,
        parts: GatewayParts,
        preset: SessionForm | None = None,
        owner: str = ANONYMOUS,
    ):
        orchestrator, config = parts.orchestrator, parts.config
        self._defaults = first_config(orchestrator, config)
        self._config = first_config(orchestrator, config, preset)
        self._session_id = session.session_id
        self._emit = outbox.emit
        self._parts = parts
        port = RealtimePort(outbox.emit)
        self._call = Call(session, self._config, parts, port, outbox, owner)
        self._items = ItemEvents(parts, self._call.changes, outbox.emit)

    @property
    def at_work(self) -> bool:
        return self._call.at_work

    def greet(self) -> None:
        self._emit("session.created", session=config_json(self._config, self._session_id))

    async def handle(self, frame: str) -> None:
        """Raises LiveError if the event is refused; it then has no effect."""
        match event := parse_client_event(frame):
            case AudioAppend():
                limit = self._parts.config.inputs.max_append_bytes
                form = self._config.input_format
                raw = decode_base64(event.audio, form, max_bytes=limit, param="audio")
                await self._call.turns.hear(raw)
            case AudioCommit():
                self._call.turns.commit()
            case AudioClear():
                self._call.turns.clear()
            case ItemCreate():
                await self._items.create(event, self._config.input_format)
            case ItemDelete():
                self._items.delete(event)
            case ItemRetrieve():
                self._items.retrieve(event, self._config.input_format)
            case ItemTruncate():
                self._items.truncate(event)
                self._call.audible.truncated(event.item_id, event.audio_end_ms)
            case PlaybackAck():
                self._call.audible.ack(event.item_id, event.audio_end_ms)
            case ResponseCreate():
                await self._create_response(event)
            case ResponseCancel():
                self._call.responses.cancel(event.response_id)
            case SessionUpdate():
                await self._update_session(event)
            case OutputAudioClear():
                raise ClientEventError(
                    "output_audio_buffer.clear exists for WebRTC and SIP only.", param="type"
                )

    async def until_over(self) -> tuple[int, str]:
        """The protocol has no event that ends a call."""
        return await asyncio.Future()

    def part(self, error: LiveError) -> None:
        if isinstance(error, IdleSessionError):  # a restart has a close code of its own
            self._emit("error", error={**error_body(error), "event_id": None})

    async def close(self) -> None:
        await self._call.close()

    async def _create_response(self, event: ResponseCreate) -> None:
        if self._config.frames is not None:
            raise ClientEventError(
                "There are no responses in frame mode: every frame ends with frame.done.",
                code="frame_mode",
                param="type",
            )
        plan = plan_response(
            event.response,
            self._config,
            self._call.conversation,
            max_audio_bytes=self._parts.config.inputs.max_append_bytes,
            now_s=self._parts.clock.now_s(),
            voice_locked=self._call.responses.has_spoken,
        )
        if event.response is not None:
            limit = self._parts.context_limit
            await check_length(limit, plan, event.response, self._config)
        self._call.responses.create(plan)

    async def _update_session(self, event: SessionUpdate) -> None:
        config = update_config(
            self._config,
            event.session,
            defaults=self._defaults,
            gateway=self._parts.config,
            voice_locked=self._call.responses.has_spoken,
        )
        limit = self._parts.context_limit
        has_tools = event.session.tools is not UNSET
        await limit.check_settings(config, self._config, "session", changes_tools=has_tools)
        if config.frames is not None and self._config.frames is None and self._call.responses.busy:
            raise ClientEventError(
                "Frame mode cannot begin while a response is in progress.",
                code="conversation_already_has_active_response",
                param="session.audio.input.turn_detection.type",
            )
        self._config = config
        self._emit("session.updated", session=config_json(self._config, self._session_id))
        self._call.turns.configure(self._config)
