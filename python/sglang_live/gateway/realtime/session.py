"""One open session: the effect of each client event.

In: parsed client events, in order. Out: server events; turns of the orchestrator's session.
Owner: one RealtimeSession per connection. Its parts own the facts: Conversation the items,
Responses the responses, AudibleResponses their playback, TurnTaking the user's audio,
SessionMonitor the record of events.
"""

import asyncio
import logging
import time

from sglang_live.aio import close_all
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.rate_limits import RateLimitStatus
from sglang_live.gateway.realtime.conversation.conversation import Conversation
from sglang_live.gateway.realtime.conversation.events import ConversationEvents
from sglang_live.gateway.realtime.events import (
    AnyClientEvent,
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
)
from sglang_live.gateway.realtime.outbox import Outbox
from sglang_live.gateway.realtime.responses.audible import AudibleResponses
from sglang_live.gateway.realtime.responses.plan import plan_response
from sglang_live.gateway.realtime.responses.responses import Responses
from sglang_live.gateway.realtime.responses.turn_runner import TurnRunner
from sglang_live.gateway.realtime.session_config import first_config, update_config
from sglang_live.gateway.realtime.turns.frame_mode import FrameMode
from sglang_live.gateway.realtime.turns.input_transcription import InputTranscription
from sglang_live.gateway.realtime.turns.turn_taking import TurnTaking
from sglang_live.interaction.filters.backchannels import Backchannels
from sglang_live.interaction.filters.echo import EchoFilter
from sglang_live.interaction.filters.side_talk import SideTalk
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.timeline import Timeline
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)


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
        self._owner = owner
        emit = outbox.emit
        self._emit = emit
        self._parts = parts
        self._conversation = Conversation(config.sessions.max_conversation_bytes, parts.item_budget)
        self._timeline = Timeline(
            session.session_id,
            began_s=parts.clock.now_s(),
            began_unix_s=time.time(),
            keeps=config.timeline_dir is not None,
        )
        self._monitor = SessionMonitor(
            session, parts.clock, parts.metrics, self._timeline, parts.user_prior
        )
        echo = EchoFilter(parts.clock, parts.metrics, parts.echo_thread)
        self._audible = AudibleResponses(
            outbox, self._conversation, self._monitor, parts.metrics, echo
        )
        self._items = ConversationEvents(parts, self._conversation, emit)
        turn_runner = TurnRunner(parts, session, self._items, self._monitor, owner)
        self._responses = Responses(
            parts=parts,
            items=self._items,
            outbox=outbox,
            audible=self._audible,
            monitor=self._monitor,
            turn_runner=turn_runner,
            admit=self._admit,
        )
        self._transcripts = InputTranscription(
            parts, session, emit, self._responses.past_first_audio, self._admit
        )
        frames = FrameMode(parts, turn_runner, emit, self._admit)
        self._turns = TurnTaking(
            config=self._config,
            parts=parts,
            items=self._items,
            responses=self._responses,
            frames=frames,
            transcripts=self._transcripts,
            # In the order in which they hear a voice.
            filters=(
                echo,
                Backchannels(self._audible.is_ending),
                *parts.other_voices(),
                SideTalk(),
            ),
            monitor=self._monitor,
            emit=emit,
        )

    def _admit(self) -> RateLimitStatus | None:
        """Count one more response. Raises DrainingError or RateLimitError."""
        self._parts.drain.check()
        return self._parts.rate_limits.take(self._owner)

    @property
    def at_work(self) -> bool:
        """Whether a response runs or plays."""
        return self._responses.at_work

    def greet(self) -> None:
        self._emit("session.created", session=self._config.to_json(self._session_id))

    async def handle(self, event: AnyClientEvent) -> None:
        """Raises LiveError if the event is refused; it then has no effect."""
        match event:
            case AudioAppend():
                await self._turns.append(event)
            case AudioCommit():
                self._turns.commit()
            case AudioClear():
                self._turns.clear()
            case ItemCreate():
                await self._items.create(event, self._config.input_format)
            case ItemDelete():
                self._items.delete(event)
            case ItemRetrieve():
                self._items.retrieve(event, self._config.input_format)
            case ItemTruncate():
                self._items.truncate(event)
                self._audible.truncated(event.item_id, event.audio_end_ms)
            case PlaybackAck():
                self._audible.ack(event.item_id, event.audio_end_ms)
            case ResponseCreate():
                await self._create_response(event)
            case ResponseCancel():
                self._responses.cancel(event.response_id)
            case SessionUpdate():
                await self._update_session(event)
            case OutputAudioClear():
                raise ClientEventError(
                    "output_audio_buffer.clear exists for WebRTC and SIP only.", param="type"
                )

    async def close(self) -> None:
        """Cancel all tasks and wait, within bounds, until they no longer use the session."""
        await close_all(
            self._turns.close,
            self._transcripts.close,
            self._responses.close,
            self._monitor.close,
            self._conversation.close,
        )
        if folder := self._parts.config.timeline_dir:
            try:
                await asyncio.to_thread(self._timeline.write, folder)
            except OSError as error:
                self._parts.metrics.timelines_lost.inc()
                log.warning("timeline_lost session=%s error=%s", self._session_id, error)

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
            self._conversation,
            max_audio_bytes=self._parts.config.inputs.max_append_bytes,
            now_s=self._parts.clock.now_s(),
            voice_locked=self._responses.has_spoken,
        )
        if event.response is not None:
            await self._parts.context_limit.check_response(plan, event.response, self._config)
        self._responses.create(plan)

    async def _update_session(self, event: SessionUpdate) -> None:
        config = update_config(
            self._config,
            event.session,
            defaults=self._defaults,
            gateway=self._parts.config,
            voice_locked=self._responses.has_spoken,
        )
        limit = self._parts.context_limit
        await limit.check_settings(config, event.session, self._config, "session")
        if config.frames is not None and self._config.frames is None and self._responses.busy:
            raise ClientEventError(
                "Frame mode cannot begin while a response is in progress.",
                code="conversation_already_has_active_response",
                param="session.audio.input.turn_detection.type",
            )
        self._config = config
        self._emit("session.updated", session=self._config.to_json(self._session_id))
        self._turns.configure(self._config)
