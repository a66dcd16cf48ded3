"""The orchestrator as its callers see it."""

from collections.abc import AsyncIterator
from typing import Protocol

from sglang_live.orchestrator.history import TurnEvent, TurnRequest


class VoiceSession(Protocol):
    """One caller's conversation: sticky to one replica of every stage, KV kept between turns."""

    session_id: str

    def respond(self, turn: TurnRequest) -> AsyncIterator[TurnEvent]:
        """Run one turn. Ends with TurnDone, or raises LiveError.

        Closing the iterator early cancels the turn in every stage; the session stays usable.
        At most one turn that is not `stateless` may run at a time.
        """
        ...

    async def close(self) -> None:
        """Free everything the session holds in any stage. Safe to call twice."""
        ...


class Orchestrator(Protocol):
    model_name: str
    voices: tuple[str, ...]

    async def open_session(self, session_id: str) -> VoiceSession:
        """Raises CapacityError when full, StageUnavailableError while a stage is down."""
        ...
