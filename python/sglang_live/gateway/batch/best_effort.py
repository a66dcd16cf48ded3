"""The orchestrator as lines of batches use it: every turn is flex, and no session is admitted.

A line takes no place from a user: it opens its session beside those that admission counts, and
runner.py decides how many there are.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from sglang_live.core import TurnEvent, TurnRequest
from sglang_live.orchestrator.session import Orchestrator, VoiceSession


class BestEffortOrchestrator:
    """An Orchestrator (orchestrator/session.py); all but sessions is that of the given one."""

    def __init__(self, orchestrator: Orchestrator):
        self._orchestrator = orchestrator

    async def open_session(self, session_id: str, *, admitted: bool = True) -> VoiceSession:
        session = await self._orchestrator.open_session(session_id, admitted=False)
        return _BestEffortSession(session)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._orchestrator, name)


class _BestEffortSession:
    def __init__(self, session: VoiceSession):
        self._session = session

    def respond(self, turn: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        return self._session.respond(replace(turn, flex=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
