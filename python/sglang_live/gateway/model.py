"""The one model that is served: its name, its voices, a session for a single turn."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sglang_live.errors import ModelNotFoundError
from sglang_live.orchestrator.session import Orchestrator, VoiceSession


def check_model(orchestrator: Orchestrator, asked: str | None) -> None:
    """None: the client takes what there is.

    Raises:
        ModelNotFoundError: there is no such model here.
    """
    served = orchestrator.model_name
    if asked not in (None, served):
        raise ModelNotFoundError(f"The model '{asked}' does not exist. Available models: {served}.")


def voice_of(voices: tuple[str, ...], asked: str | None) -> str:
    """The voice that speaks: clients name voices of other servers, and get the default."""
    return asked if asked in voices else (voices[0] if voices else asked or "")


@asynccontextmanager
async def brief_session(orchestrator: Orchestrator, session_id: str) -> AsyncIterator[VoiceSession]:
    """Raises CapacityError when full, StageUnavailableError while a stage is down."""
    session = await orchestrator.open_session(session_id)
    try:
        yield session
    finally:
        await session.close()
