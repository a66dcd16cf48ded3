"""Control of the thinker's engine other than by requests. Exists only with policies."""

import asyncio
import logging
from typing import Any, TypeVar

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

_Answer = TypeVar("_Answer", Truncated, Retained)

# The scheduler changes sessions between two rounds, and one with much prefill may take that long.
ANSWER_TIMEOUT_S = 2.0


class ThinkerFeed:
    def __init__(self, socket: FeedSocket, clock: Clock):
        self._socket = socket
        self.progress = ProgressFeed(socket.send, clock)
        self._awaited: dict[tuple[type, str], asyncio.Future[Any]] = {}

    def interrupt(self, rid: str) -> None:
        self._socket.send(Interrupt(rid))

    def speech_start(self, engine_session: str) -> None:
        self._socket.send(SpeechStart(engine_session))

    def next_use(
        self,
        engine_session: str,
        to_play_s: float,
        response_gap_s: float | None,
        observed_gap_s: float | None,
    ) -> None:
        self._socket.send(NextUseHint(engine_session, to_play_s, response_gap_s, observed_gap_s))

    async def truncate(self, engine_session: str, n_tokens: int) -> bool:
        """Make the session hold its first n_tokens only.

        Returns:
            False if the engine refused or did not answer: what the session holds is not known then.
        """
        answer = await self._send_and_wait(TruncateSession(engine_session, n_tokens), Truncated)
        if answer is not None and answer.n_tokens != n_tokens:
            log.warning("truncation_refused session=%s n_tokens=%d", engine_session, n_tokens)
        return answer is not None and answer.n_tokens == n_tokens

    def tell_bound(self, order: RetainSession, *, running: str = "") -> None:
        """As retain, without waiting for what the session holds.

        Args:
            running: id of the session's running request. "": none.
        """
        self._socket.send(msgspec.structs.replace(order, acknowledge=False, running=running))

    async def retain(self, order: RetainSession) -> Retained | None:
        """Bound the session. None: what it holds is not known."""
        answer = await self._send_and_wait(order, Retained)
        return answer if answer is not None and answer.n_tokens >= 0 else None

    async def retain_native(self, order: RetainSession) -> bool:
        """Bound a session of SGLang's own API. Returns False if the engine did not answer."""
        order = msgspec.structs.replace(order, every_request=True)
        return await self._send_and_wait(order, Retained) is not None

    def answered(self, report: Truncated | Retained) -> None:
        answer = self._awaited.get((type(report), report.session))
        if answer is not None and not answer.done():
            answer.set_result(report)

    async def _send_and_wait(
        self, order: TruncateSession | RetainSession, kind: type[_Answer]
    ) -> _Answer | None:
        key = kind, order.session
        answer = self._awaited[key] = asyncio.get_running_loop().create_future()
        self._socket.send(order)
        try:
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT_S)
        except TimeoutError:
            log.warning("unanswered order=%s session=%s", type(order).__name__, order.session)
            return None
        finally:
            del self._awaited[key]
