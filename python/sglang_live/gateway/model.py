"""The served model: its name, its voices, and sessions of a single turn."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from sglang_live.errors import ModelNotFoundError
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.flex.gate import FlexGate
from sglang_live.orchestrator.session import Orchestrator, VoiceSession

# Clients of OpenAI's servers send one of these unless they are told another.
_OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova"),
    *("onyx", "sage", "shimmer", "verse"),
)
_MOST_LISTED = 20


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


def known_voice(voices: tuple[str, ...], name: str | None) -> str:
    """As voice_of, but only for voices of OpenAI's servers, and in any case of letters.

    Raises:
        ClientEventError: there is no such voice.
    """
    same = [voice for voice in voices if name is not None and voice.lower() == name.lower()]
    if voices and name is not None and not same and name not in _OPENAI_VOICES:
        listed = ", ".join(voices[:_MOST_LISTED]) + (", …" if voices[_MOST_LISTED:] else "")
        raise ClientEventError(
            f"There is no voice {cut(name)!r}. The voices are: {listed}.", param="voice"
        )
    return same[0] if same else voice_of(voices, name)


@asynccontextmanager
async def brief_session(
    orchestrator: Orchestrator, session_id: str, flex: FlexGate | None = None
) -> AsyncIterator[VoiceSession]:
    """A session that lasts as long as the context.

    Args:
        flex: bound on flex requests, of which this is one: admission counts no session. None: it
            is none.
    Raises:
        CapacityError: the server is full.
        FlexBusyError: there are too many flex requests.
        StageUnavailableError: a stage is down.
    """
    async with flex.place() if flex else nullcontext():
        session = await orchestrator.open_session(session_id, admitted=flex is None)
        try:
            yield session
        finally:
            await session.close()
