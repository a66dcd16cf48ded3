"""A session of the Realtime protocol that converses: items, responses and their playback.

In: client events, in order. Out: server events; what they ask of the call.
Owner: one ConversationSession per connection.
"""

from dataclasses import replace
from typing import Any

from msgspec import UNSET

from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import (
    AnyClientEvent,
    ItemCreate,
    ItemTruncate,
    OutputAudioClear,
    PlaybackAck,
    ResponseCancel,
    ResponseCreate,
    SessionForm,
    SessionUpdate,
)
from sglang_live.gateway.realtime.item_schema import Input
from sglang_live.gateway.realtime.response_plan import check_length, plan_response
from sglang_live.gateway.realtime.session import Client, RealtimeSession
from sglang_live.gateway.realtime.session_config import config_json, first_config, update_config
from sglang_live.orchestrator.sessions import VoiceSession


class ConversationSession(RealtimeSession):
    """
    preset: settings of the session from its client secret; None: the defaults.
    config: its settings at another gateway; None: it begins.
    """

    def __init__(
        self,
        session: VoiceSession,
        client: Client,
        parts: GatewayParts,
        preset: SessionForm | None = None,
        config: SessionConfig | None = None,
    ):
        self._defaults = first_config(parts.orchestrator, parts.config)
        if config is None:
            voices = parts.voices_of(client.owner)
            config = first_config(parts.orchestrator, parts.config, preset, voices)
        super().__init__(session, client, parts, config, answers=True)

    def _settings(self) -> dict[str, Any]:
        return config_json(self._config, self._session_id)

    async def _handle_own(self, event: AnyClientEvent) -> None:
        match event:
            case ItemCreate():
                await self._items.create(event, self._config.input_format)
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
            case OutputAudioClear() if self._sound is None:
                raise ClientEventError(
                    "output_audio_buffer.clear exists for WebRTC and SIP only.", param="type"
                )
            case OutputAudioClear():
                if self._call.responses.busy:  # what it is still making is not heard either
                    self._call.responses.cancel(None)
                self._call.audible.interrupt()

    async def _create_response(self, event: ResponseCreate) -> None:
        if self._config.frames is not None:
            raise ClientEventError(
                "There are no responses in frame mode: every frame ends with frame.done.",
                code="frame_mode",
                param="type",
            )
        config = self._parts.config
        given = Input(self._config.input_format, config.inputs.max_append_bytes, config.model.sees)
        plan = await plan_response(
            event.response,
            self._with_voices(self._config),
            self._call.conversation,
            given=given,
            now_s=self._parts.clock.now_s(),
            voice_locked=self._call.responses.has_spoken,
        )
        self._check_formats(plan.config)
        if event.response is not None:
            limit = self._parts.context_limit
            await check_length(limit, plan, event.response, self._config)
        self._call.responses.create(plan)

    def _with_voices(self, config: SessionConfig) -> SessionConfig:
        """With the voices that there are now."""
        return replace(config, voices=self._parts.voices_of(self._client.owner))

    async def _update_session(self, event: SessionUpdate) -> None:
        config = update_config(
            self._config,
            event.session,
            defaults=self._with_voices(self._defaults),
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
        self._call.turns.check(config)
        self._configure(config)
