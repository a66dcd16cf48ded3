"""The Realtime protocol on a wire: its sessions, and its errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.call.link import CallLink
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.wire import Wire
from sglang_live.gateway.errors import error_body
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.realtime.conversation_session import ConversationSession
from sglang_live.gateway.realtime.events import SessionForm, event_id_of
from sglang_live.gateway.realtime.session import Client, RealtimeSession
from sglang_live.gateway.realtime.transcription_session import TranscriptionSession
from sglang_live.gateway.webrtc.sound import CallSound
from sglang_live.orchestrator.sessions import VoiceSession

if TYPE_CHECKING:  # without a journal it is not imported
    from sglang_live.gateway.call.saved_call import SavedCall


@dataclass(frozen=True, slots=True)
class RealtimeProtocol:
    """
    preset: settings of the session from its client secret; None: the defaults.
    owner: owner of the client's key.
    transcribes: it is a session for transcription, by a model of this name.
    sound_of: makes the sound of a call whose audio is no events; None: audio is events.
    saved: the call of another gateway, which goes on here; None: it begins.
    """

    parts: GatewayParts
    preset: SessionForm | None = None
    owner: str = ANONYMOUS
    transcribes: bool = False
    model: str | None = None
    sound_of: Callable[[Outbox], CallSound] | None = None
    saved: "SavedCall | None" = None

    def open(self, session: VoiceSession, outbox: Outbox) -> RealtimeSession:
        sound = self.sound_of(outbox) if self.sound_of else None
        client = Client(outbox, self.owner, sound)
        config = self.saved.config if self.saved else None
        opened: RealtimeSession
        if self.transcribes:
            opened = TranscriptionSession(
                session, client, self.parts, self.preset, self.model, config
            )
        else:
            opened = ConversationSession(session, client, self.parts, self.preset, config)
        if self.saved is None:
            opened.greet()
        else:
            opened.go_on(self.saved)
        return opened

    def refuse(self, outbox: Outbox, error: LiveError, frame: str | None) -> None:
        event_id = None if frame is None else event_id_of(frame)
        outbox.emit("error", error={**error_body(error), "event_id": event_id})


def realtime_link(
    wire: Wire, parts: GatewayParts, saved: "SavedCall | None" = None, **settings: Any
) -> CallLink:
    """saved, settings: fields of RealtimeProtocol."""
    protocol = RealtimeProtocol(parts, saved=saved, **settings)
    return CallLink(wire, parts, protocol, kind="sess", saved=saved)
