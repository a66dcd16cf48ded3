"""Who listens and speaks in a Live session: the port behind which a model stands.

The session asks it for exactly as much audio as time passes. A model with turns stands behind
TurnVoice (turn_voice.py), one that hears while it speaks behind DuplexVoice (duplex_voice.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from sglang_live.core import HistoryItem
from sglang_live.errors import LiveError
from sglang_live.gateway.live.work import Item

TICK_MS = 100
AppendKind = Literal["instructions", "thinking", "commentary"]


@dataclass(frozen=True, slots=True)
class Spoken:
    """Audio of one tick.

    audio: in the session's format, silence included.
    is_silence: nothing is spoken in it.
    text: the words whose audio ends in it.
    on_sent: to be called when the network has taken it.
    """

    audio: bytes
    is_silence: bool
    text: str
    on_sent: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the conversation before the session. role: as in the model's history."""

    role: Literal["system", "user", "assistant"]
    text: str


class VoiceListener(Protocol):
    def user_said(self, text: str, start_ms: float, end_ms: float) -> None:
        """start_ms, end_ms: in the user's audio."""

    def delegated(self, delegation_id: str) -> None:
        """Work is needed that the application does."""

    def voice_failed(self, error: LiveError) -> None:
        """Something will not be spoken."""


class Voice(Protocol):
    """
    acknowledgement_delay_ms: from a delegation without words to a spoken acknowledgement.
    hears_silence: it has to be given silence in the place of audio that does not come.
    """

    acknowledgement_delay_ms: int
    hears_silence: bool

    @property
    def at_work(self) -> bool:
        """Whether it speaks, or is about to."""
        ...

    async def begin(self, before: Iterable[Said]) -> None:
        """Check instructions and earlier conversation.

        Raises:
            LiveError: they are too long, or it cannot speak with them.
        """

    async def hear(self, raw: bytes) -> None:
        """The next audio of the user, whole samples in the session's format."""

    def take(self, n_bytes: int) -> Spoken:
        """Raises LiveError if it can speak no more, which ends the session."""
        ...

    async def append(self, kind: AppendKind, text: str, delegation_id: str | None) -> None:
        """Add to what it knows. Commentary it speaks about, as soon as it is quiet.

        Raises:
            ClientEventError: there is no such delegation, or the text is too long.
        """

    def conversation(self) -> tuple[HistoryItem, ...]:
        """All that was said and appended so far, as the model knows it."""
        ...

    def transcript(self) -> tuple[Item, ...]:
        """The same in words, as messages of the Responses API."""
        ...

    def stop_speaking(self) -> None: ...

    async def close(self) -> None: ...
