"""The thinker stage's way into its engine beside requests. There is one only with policies."""

import asyncio
import logging

import msgspec

from sglang_live.clock import Clock
from sglang_live.engine_channel.messages import (
    Interrupt,
    NextUseHint,
    Retained,
    RetainSession,
    SpeechStart,
    Truncated,
    TruncateSession,
)
from sglang_live.stages.engine_host import FeedSocket
from sglang_live.stages.progress_feed import ProgressFeed

log = logging.getLogger(__name__)

# The scheduler changes sessions between two rounds; one that prefills a lot may take that long.
ANSWER_TIMEOUT_S = 2.0


class ThinkerFeed:
    def __init__(self, socket: FeedSocket, clock: Clock):
        self._socket = socket
        self.progress = ProgressFeed(socket.send, clock)
        self._asked: dict[tuple[type, str], asyncio.Future] = {}

    def interrupt(self, rid: str) -> None:
        self._socket.send(Interrupt(rid))

    def speech_start(self, engine_session: str) -> None:
        self._socket.send(SpeechStart(engine_session))

    def next_use(
        self,
        engine_session: str,
        buffered_s: float,
        response_gap_s: float | None,
        observed_gap_s: float | None,
    ) -> None:
        self._socket.send(NextUseHint(engine_session, buffered_s, response_gap_s, observed_gap_s))

    async def truncate(self, engine_session: str, n_tokens: int) -> bool:
        """Make the session hold its first n_tokens only. False: nobody knows what it holds now."""
        answer = await self._ask(TruncateSession(engine_session, n_tokens), Truncated)
        if answer is not None and answer.n_tokens != n_tokens:
            log.warning("truncation_refused session=%s n_tokens=%d", engine_session, n_tokens)
        return answer is not None and answer.n_tokens == n_tokens

    def tell_bound(self, order: RetainSession, *, running: str = "") -> None:
        """As retain, when it does not matter yet what the session holds."""
        self._socket.send(msgspec.structs.replace(order, acknowledge=False, running=running))

    async def retain(self, order: RetainSession) -> Retained | None:
        """Bound the session. None: nobody knows what it holds now."""
        answer = await self._ask(order, Retained)
        return answer if answer is not None and answer.n_tokens >= 0 else None

    async def retain_native(self, order: RetainSession) -> bool:
        """Bound a session whose requests do not come from here. False: nobody knows if it is."""
        order = msgspec.structs.replace(order, every_request=True)
        return await self._ask(order, Retained) is not None

    def answered(self, report: Truncated | Retained) -> None:
        answer = self._asked.get((type(report), report.session))
        if answer is not None and not answer.done():
            answer.set_result(report)

    async def _ask(self, order: TruncateSession | RetainSession, kind: type):
        key = kind, order.session
        answer = self._asked[key] = asyncio.get_running_loop().create_future()
        self._socket.send(order)
        try:
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT_S)
        except TimeoutError:
            log.warning("unanswered order=%s session=%s", type(order).__name__, order.session)
            return None
        finally:
            del self._asked[key]
