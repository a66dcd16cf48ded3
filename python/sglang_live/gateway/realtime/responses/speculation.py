"""A turn that is begun in a pause, before it is known that the caller is done.

In: a turn whose last message ends at the pause. Out: its events, kept until somebody wants them; or
nothing, as if it had never been asked.
Owner: Turns, one at a time. The stages run it like any other turn.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from sglang_live.core import TurnEvent, TurnRequest
from sglang_live.errors import LiveError
from sglang_live.gateway.realtime.turns.turn_prefill import Pieces
from sglang_live.orchestrator.session import VoiceSession

# As with an interrupted turn: longer, and something is wrong with it.
_WITHDRAWN_S = 5.0


class SpeculativeTurn:
    """
    Args:
        request: the turn; its history ends with `said`.
        said: what the caller had said by then, as the model's session holds it.
    """

    def __init__(self, session: VoiceSession, request: TurnRequest, said: Pieces):
        self.said = said
        self._session, self._request = session, request
        self._events: asyncio.Queue[TurnEvent | Exception | None] = asyncio.Queue()
        self._withdrawing: asyncio.TimerHandle | None = None
        self.task = asyncio.create_task(self._pump(), name="speculative turn")

    def is_for(self, request: TurnRequest) -> bool:
        """Whether it is this turn, under another name."""
        mine, other = (
            replace(turn, speculative=False, history=()) for turn in (self._request, request)
        )
        keys, others = ([i.key for i in turn.history] for turn in (self._request, request))
        return mine == other and keys == others

    def withdraw(self) -> None:
        """It was wrong. Its session forgets it."""
        if self._withdrawing is not None or self.task.done():
            return
        if self._session.interrupt():
            loop = asyncio.get_running_loop()
            self._withdrawing = loop.call_later(_WITHDRAWN_S, self.task.cancel)
        else:
            self.task.cancel()

    async def events(self) -> AsyncIterator[TurnEvent]:
        """As VoiceSession.respond would give them, the first ones at once."""
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def _pump(self) -> None:
        try:
            async with aclosing(self._session.respond(self._request)) as events:
                async for event in events:
                    self._events.put_nowait(event)
        except LiveError as error:
            self._events.put_nowait(error)
        finally:
            if self._withdrawing is not None:
                self._withdrawing.cancel()
            self._events.put_nowait(None)
