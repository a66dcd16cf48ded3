"""The served model: its name, its voices, and sessions of a single turn."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sglang_live.errors import ModelNotFoundError
from sglang_live.orchestrator.session import Orchestrator, VoiceSession


def check_model(orchestrator: Orchestrator, name: str | None) -> None:
    """name: None for the served model.

    Raises:
        ModelNotFoundError: another model is named.
    """
    served = orchestrator.model_name
    if name not in (None, served):
        raise ModelNotFoundError(f"The model '{name}' does not exist. Available models: {served}.")


def voice_of(voices: tuple[str, ...], name: str | None) -> str:
    """The voice that speaks: the default one for voices of other servers, which clients name."""
    return name if name in voices else (voices[0] if voices else name or "")


@asynccontextmanager
async def brief_session(orchestrator: Orchestrator, session_id: str) -> AsyncIterator[VoiceSession]:
    """A session that lasts as long as the context.

    Raises:
        CapacityError: the server is full.
        StageUnavailableError: a stage is down.
    """
    session = await orchestrator.open_session(session_id)
    try:
        yield session
    finally:
        await session.close()
