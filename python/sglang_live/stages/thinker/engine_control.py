"""Control of the thinker's engine other than by requests. Exists only with policies."""

import asyncio
import logging
from itertools import count
from typing import TypeVar

import msgspec

from sglang_live.clock import Clock
from sglang_live.messages import (
    Interrupt,
    MeasureKv,
    Promote,
    Retained,
    RetainSession,
    SessionHint,
    SessionKv,
    Truncated,
    TruncateSession,
)
from sglang_live.stages.engine_link import FeedSocket, HeardFeed

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", Truncated, SessionKv, Retained)

# The scheduler changes sessions between two rounds, and one with much prefill may take that long.
LATE_S = 2.0
# Limit of every answer. Shorter than the silence after which a turn fails.
ANSWER_TIMEOUT_S = 20.0


class ThinkerFeed:
    def __init__(self, socket: FeedSocket, clock: Clock):
        self._socket = socket
        self.heard = HeardFeed(socket.send, clock)
        self._ask_ids = count(1)
        self._awaited: dict[int, asyncio.Future[Truncated | SessionKv | Retained]] = {}
        self.n_late = 0  # answers that took longer than LATE_S
        self.n_missing = 0  # that did not come within ANSWER_TIMEOUT_S

    @property
    def awaits_answer(self) -> bool:
        return bool(self._awaited)

    def interrupt(self, rid: str) -> None:
        self._socket.send(Interrupt(rid))

    def promote(self, rid: str) -> None:
        self._socket.send(Promote(rid))

    def hint(self, hint: SessionHint) -> None:
        self._socket.send(hint)

    async def truncate(self, engine_session: str, n_tokens: int) -> bool:
        """Make the session hold its first n_tokens only.

        A late answer is waited for: an engine that is late has much to do, and a session that is
        built anew would add to it.

        Returns:
            False if the engine refused or did not answer: what the session holds is not known then.
        """
        answer = await self._ask(TruncateSession(engine_session, n_tokens), Truncated)
        is_done = answer is not None and answer.n_tokens == n_tokens
        if not is_done:
            log.warning("truncation_refused session=%s n_tokens=%d", engine_session, n_tokens)
        return is_done

    def tell_bound(self, order: RetainSession, *, running: str = "") -> None:
        """As retain, without waiting for what the session holds.

        Args:
            running: id of the session's running request. "": none.
        """
        self._socket.send(msgspec.structs.replace(order, acknowledge=False, running=running))

    async def retain(self, order: RetainSession) -> Retained | None:
        """Bound the session. None: what it holds is not known."""
        answer = await self._ask(order, Retained)
        return answer if answer is not None and answer.n_tokens >= 0 else None

    async def retain_native(self, order: RetainSession) -> bool:
        """Bound a session of SGLang's own API. Returns False if the engine did not answer."""
        order = msgspec.structs.replace(order, every_request=True)
        return await self._ask(order, Retained) is not None

    async def kv_held(self, engine_session: str) -> int | None:
        """Tokens of the session that its next request need not compute. None: not known."""
        answer = await self._ask(MeasureKv(engine_session), SessionKv)
        return None if answer is None else answer.n_tokens

    def answered(self, report: Truncated | SessionKv | Retained) -> None:
        answer = self._awaited.get(report.ask_id)
        if answer is not None and not answer.done():
            answer.set_result(report)

    async def _ask(
        self, order: TruncateSession | MeasureKv | RetainSession, kind: type[_Answer]
    ) -> _Answer | None:
        """Returns None if no answer came in time."""
        ask_id, name = next(self._ask_ids), type(order).__name__
        answer = self._awaited[ask_id] = asyncio.get_running_loop().create_future()
        self._socket.send(msgspec.structs.replace(order, ask_id=ask_id))
        try:
            await asyncio.wait([answer], timeout=LATE_S)
            if not answer.done():
                self.n_late += 1
                log.warning("late order=%s session=%s", name, order.session_id)
                await asyncio.wait([answer], timeout=ANSWER_TIMEOUT_S - LATE_S)
            if not answer.done():
                self.n_missing += 1
                log.warning("unanswered order=%s session=%s", name, order.session_id)
                return None
            report = answer.result()
            assert isinstance(report, kind)
            return report
        finally:
            del self._awaited[ask_id]
