"""A turn that starts in a pause, before the end of the user's turn is certain.

In: a request whose last message ends at the pause. Out: its events, kept until the turn is
confirmed; if it is withdrawn, the session returns to its state before the turn.
Owner: TurnRunner, one at a time. The stages run it like any other turn.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from sglang_live.aio import Channel, background
from sglang_live.core import HistoryItem, TurnEvent, TurnRequest
from sglang_live.errors import LiveError
from sglang_live.orchestrator.sessions import VoiceSession

# An interrupted turn ends within a round or two of its stages; after this time it is cancelled.
_WITHDRAWN_S = 5.0

# Events that are kept until the turn is confirmed: with as many, its stages wait. Some sentences.
_MOST_EVENTS = 128

# The speech of one user turn, in one message or in several that follow one another.
Utterance = tuple[HistoryItem, ...]


class SpeculativeTurn:
    """
    Args:
        request: the turn; its history ends with `utterance`.
        utterance: the user's speech up to the pause, as the model's session holds it.
    Attributes:
        failed: whether it has failed.
    """

    def __init__(self, session: VoiceSession, request: TurnRequest, utterance: Utterance):
        self.utterance = utterance
        self.failed = False
        self._session = session
        self._request = request
        self._events: Channel[TurnEvent] = Channel(_MOST_EVENTS)
        self._cancel_late: asyncio.TimerHandle | None = None
        self.task = background(self._run(), "speculative turn")

    def is_for(self, request: TurnRequest) -> bool:
        """Whether the request is this turn, apart from its being speculative."""
        own, other = (
            replace(turn, speculative=False, history=()) for turn in (self._request, request)
        )
        own_keys, keys = ([i.key for i in turn.history] for turn in (self._request, request))
        return own == other and own_keys == keys

    def withdraw(self) -> None:
        """End the turn; the session drops what it added."""
        self._session.end_speculation(confirmed=False)
        self._events.close()  # the turn goes on until its stages have ended it
        if self._cancel_late is not None or self.task.done():
            return
        if self._session.interrupt():
            loop = asyncio.get_running_loop()
            self._cancel_late = loop.call_later(_WITHDRAWN_S, self.task.cancel)
        else:
            self.task.cancel()

    def confirm(self) -> AsyncGenerator[TurnEvent, None]:
        """The user's turn is over: returns the events of the response."""
        self._session.end_speculation(confirmed=True)
        return self._until_end()

    async def _until_end(self) -> AsyncGenerator[TurnEvent, None]:
        """Yield what VoiceSession.respond yields; those that came before, at once."""
        try:
            async for event in self._events:
                yield event
        finally:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with aclosing(self._session.respond(self._request)) as events:
                async for event in events:
                    await self._events.put(event)
        except Exception as error:
            self.failed = True
            self._events.end(error)
            if not isinstance(error, LiveError):
                raise
        finally:
            if self._cancel_late is not None:
                self._cancel_late.cancel()
            self._events.end()
