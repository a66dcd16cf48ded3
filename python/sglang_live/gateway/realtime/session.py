"""What every session of the Realtime protocol does: it hears turns and keeps their items.

In: client events, in order. Out: server events; what they ask of the call.
Owner: one RealtimeSession per connection.
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import PCM, PCM_16K, decode_base64
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.call.call import Call
from sglang_live.gateway.call.link import IdleSessionError
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.resumption import Resumption
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.errors import ClientEventError, error_body
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import (
    AnyClientEvent,
    AudioAppend,
    AudioClear,
    AudioCommit,
    ItemDelete,
    ItemRetrieve,
    parse_client_event,
)
from sglang_live.gateway.realtime.item_events import ItemEvents
from sglang_live.gateway.realtime.server_events import RealtimePort, audio_of, with_audio
from sglang_live.gateway.webrtc.sound import EARLY_S, CallSound
from sglang_live.interaction.input_buffer import BufferFullError
from sglang_live.orchestrator.sessions import VoiceSession


@dataclass(frozen=True, slots=True)
class Client:
    """
    outbox: of its events.
    owner: owner of its key, for limits.
    sound: of a call whose audio is no events; None: audio is events.
    """

    outbox: Outbox
    owner: str = ANONYMOUS
    sound: CallSound | None = None


class RealtimeSession(ABC):
    """
    config: its settings at first.
    answers: whether the call can respond.
    """

    def __init__(
        self,
        session: VoiceSession,
        client: Client,
        parts: GatewayParts,
        config: SessionConfig,
        *,
        answers: bool,
    ):
        self._session_id = session.session_id
        self._config = config
        self._client = client
        self._emit, self._sound = client.outbox.emit, client.sound
        self.resumption: Resumption | None = None
        self._parts = parts
        self._told_of_full_buffer = False
        self._check_formats(config)
        self._call = Call(
            session,
            self._heard_as(config),
            parts,
            RealtimePort(client.outbox.emit, client.sound),
            client.sound or client.outbox,
            client.owner,
            EARLY_S if client.sound else None,
            answers=answers,
        )
        self._items = ItemEvents(parts, self._call.changes, client.outbox.emit)

    @property
    def at_work(self) -> bool:
        return self._call.at_work

    def greet(self) -> None:
        self._allow_resumption()
        self._emit("session.created", session=self._shown())

    async def handle(self, frame: str) -> None:
        """Raises LiveError if the event is refused; it then has no effect."""
        match event := parse_client_event(frame):
            case AudioAppend() if self._sound is not None:
                raise ClientEventError(
                    "The audio of this call comes over its connection, not in events.",
                    param="type",
                )
            case AudioAppend():
                limit = self._parts.config.inputs.max_append_bytes
                form = self._config.input_format
                raw = decode_base64(event.audio, form, max_bytes=limit, param="audio")
                await self._call.turns.hear(raw)
            case AudioCommit():
                self._call.turns.commit()
            case AudioClear():
                self._call.turns.clear()
            case ItemDelete():
                self._items.delete(event)
            case ItemRetrieve():
                self._items.retrieve(event, self._config.input_format)
            case _:
                await self._handle_own(event)

    async def hear(self, pcm: bytes) -> None:
        """The user's sound, at INPUT_RATE_HZ. Raises LiveError if it cannot be kept, once."""
        if self._sound is None:
            raise ClientEventError("Binary frames hold no events.", code="invalid_event")
        try:
            await self._call.turns.hear(pcm)
            self._told_of_full_buffer = False
        except BufferFullError:
            # A microphone goes on: only the client can empty the buffer.
            if not self._told_of_full_buffer:
                self._told_of_full_buffer = True
                raise

    async def until_over(self) -> tuple[int, str]:
        """The protocol has no event that ends a call."""
        return await asyncio.Future()

    def part(self, error: LiveError) -> None:
        if isinstance(error, IdleSessionError):  # a restart has a close code of its own
            self._emit("error", error={**error_body(error), "event_id": None})

    async def close(self) -> None:
        if self.resumption is not None:
            self.resumption.close()
        await self._call.close()

    def _configure(self, config: SessionConfig) -> None:
        self._check_formats(config)
        self._config = config
        self._allow_resumption()
        self._emit("session.updated", session=self._shown())
        self._call.turns.configure(self._heard_as(config))

    def _heard_as(self, config: SessionConfig) -> SessionConfig:
        """input_format is that of items; of a call's sound it is what the packets give."""
        return config if self._sound is None else replace(config, input_format=PCM_16K)

    def _check_formats(self, config: SessionConfig) -> None:
        """Raises ClientEventError if the call's sound has another form."""
        if self._sound is not None and config.output_format != PCM:
            raise ClientEventError(
                "The audio of this call is Opus, decoded to audio/pcm.",
                param="session.audio.output.format",
            )

    def _allow_resumption(self) -> None:
        # A call over WebRTC has no socket that could be lost.
        resume_s = self._parts.config.limits.resume_s if self._sound is None else 0
        allowed = self._config.resumable and resume_s > 0
        if allowed and self.resumption is None:
            self.resumption = Resumption(
                self._parts.resumable_calls,
                self._call,
                self._client.outbox,
                self._parts.clock,
                self._client.owner,
                audio_of=audio_of,
                with_audio=with_audio,
                welcome=lambda n_read: (
                    "session.resumed",
                    {"session": self._shown(), "events_received": n_read},
                ),
            )
        elif not allowed and self.resumption is not None:
            self.resumption.close()
            self.resumption = None

    def _shown(self) -> dict[str, Any]:
        """The settings as the protocol shows them."""
        shown = self._settings()
        if self._config.resumable:
            resumption, grace_s = self.resumption, self._parts.config.limits.resume_s
            token = resumption and {"token": resumption.token, "grace_ms": round(1000 * grace_s)}
            shown["resumable"] = token
        return shown

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """The settings as the protocol shows them, but for the session's token."""

    @abstractmethod
    async def _handle_own(self, event: AnyClientEvent) -> None:
        """Events that not every session has. Raises LiveError if the event is refused."""
