"""What every session of the Realtime protocol does: it hears turns and keeps their items.

In: client events, in order. Out: server events; what they ask of the call.
Owner: one RealtimeSession per connection.
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang_live.errors import LiveError
from sglang_live.gateway.audio.codec import PCM, PCM_16K, decode_base64
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.call.call import Call
from sglang_live.gateway.call.link import IdleSessionError
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.resumption import Resumption
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.call.wire import CLOSE_NORMAL
from sglang_live.gateway.errors import ClientEventError, error_body
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.events import (
    AnyClientEvent,
    AudioAppend,
    AudioClear,
    AudioCommit,
    ItemDelete,
    ItemRetrieve,
    PlaybackAck,
    parse_client_event,
)
from sglang_live.gateway.realtime.item_events import ItemEvents
from sglang_live.gateway.realtime.server_events import RealtimePort, audio_of, with_audio
from sglang_live.gateway.webrtc.sound import EARLY_S, CallSound
from sglang_live.interaction.input_buffer import BufferFullError
from sglang_live.orchestrator.sessions import VoiceSession

if TYPE_CHECKING:  # without a journal it is not imported
    from sglang_live.gateway.call.journaled import JournaledCall
    from sglang_live.gateway.call.saved_call import SavedCall


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

    Attributes:
        kind: type of its settings in the protocol.
    """

    kind = "realtime"

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
        self._journaled: JournaledCall | None = None
        self._is_taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._comes_again = False
        self._voice_session = session
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

    def go_on(self, saved: "SavedCall") -> None:
        """With the call of another gateway. Its settings are this session's already."""
        call, lacked = self._call, saved.lacked_items()
        unfinished = saved.unfinished(call.now_s)
        open_item = unfinished.open_item if unfinished else None
        for item in saved.items:
            before = call.conversation.insert(item)
            if item.id in lacked and item is not open_item:
                call.port.item_added(item, before)
        call.conversation.id = saved.head.conversation
        call.responses.has_spoken = saved.head.has_spoken
        history = [piece for item in saved.items for piece in item.pieces()]
        self._voice_session.restore(history, saved.head.n_turns)
        self._allow_resumption(saved)
        self._emit(
            "session.resumed",
            session=self._shown(),
            events_received=saved.n_settled,
            items=[item.id for item in saved.items],
        )
        if unfinished is not None:
            call.responses.go_on(unfinished)
        if self._parts.config.turns.preheat and not call.responses.busy:
            # The stages then know whose the session is, before the earlier owner closes it.
            call.responses.turn_runner.prefill_turn(self._config, ())

    def read(self, n_read: int) -> None:
        if self._journaled is not None:
            self._journaled.read(n_read, comes_again=self._comes_again)

    async def handle(self, frame: str) -> None:
        """Raises LiveError if the event is refused; it then has no effect."""
        self._comes_again = False
        if self._journaled is not None:
            self._journaled.reading()
        event = parse_client_event(frame)
        self._comes_again = isinstance(event, AudioAppend | PlaybackAck)
        match event:
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
        """The protocol has no event that ends a call; it may go on at another gateway."""
        await asyncio.shield(self._is_taken)
        return CLOSE_NORMAL, "resumed"

    def part(self, error: LiveError) -> None:
        if isinstance(error, IdleSessionError):  # a restart has a close code of its own
            self._emit("error", error={**error_body(error), "event_id": None})

    async def close(self) -> None:
        if self.resumption is not None:
            self.resumption.close()
        if self._journaled is not None:
            self._journaled.close()
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

    def _allow_resumption(self, saved: "SavedCall | None" = None) -> None:
        """saved: of the gateway that had the call before, if one had."""
        # A call over WebRTC has no socket that could be lost.
        resume_s = self._parts.config.limits.resume_s if self._sound is None else 0
        allowed = self._config.resumable and resume_s > 0
        if allowed and self.resumption is None:
            self._journal(saved)
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
                on_token=self._tell_token,
                is_here=self._journaled.is_here if self._journaled else None,
                hand_over=self._journaled.hand_over if self._journaled else None,
            )
        elif not allowed and self.resumption is not None:
            self.resumption.close()
            self.resumption = None
        if self._journaled is not None and (not allowed or self._config.frames is not None):
            self._journaled.close()
            self._journaled = None
        self._call.outlives_drain = self._journaled is not None

    def _journal(self, saved: "SavedCall | None") -> None:
        journal = self._parts.journal
        if journal is None or self._config.frames is not None:
            return
        from sglang_live.gateway.call.journaled import JournaledCall

        self._journaled = JournaledCall(
            journal,
            self._voice_session,
            self._call,
            self._client.outbox,
            owner=self._client.owner,
            kind=self.kind,
            config=lambda: self._config,
            on_taken=self._taken,
            saved=saved,
        )

    def _tell_token(self, token: str) -> None:
        if self._journaled is not None:
            self._journaled.resumable_by(token)

    def _taken(self) -> None:
        if not self._is_taken.done():
            self._is_taken.set_result(None)

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
