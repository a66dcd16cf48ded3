"""The thinker stage's way into its engine beside requests. There is one only with policies."""

import asyncio
import logging

from sglang_live.bridge.feed_types import EndReply, SpeechStart, Truncated, TruncateSession
from sglang_live.clock import Clock
from sglang_live.stages.engine_host import FeedSocket
from sglang_live.stages.progress_feed import ProgressFeed

log = logging.getLogger(__name__)

# The scheduler truncates between two rounds; a round that prefills a lot may take that long.
TRUNCATE_TIMEOUT_S = 2.0


class ThinkerFeed:
    def __init__(self, socket: FeedSocket, clock: Clock):
        self._socket = socket
        self.progress = ProgressFeed(socket.send, clock)
        self._asked: dict[str, asyncio.Future[int]] = {}

    def end_reply(self, rid: str) -> None:
        self._socket.send(EndReply(rid))

    def speech_start(self, engine_session: str) -> None:
        self._socket.send(SpeechStart(engine_session))

    async def truncate(self, engine_session: str, n_tokens: int) -> bool:
        """Make the session hold its first n_tokens only. False: nobody knows what it holds now."""
        answer = self._asked[engine_session] = asyncio.get_running_loop().create_future()
        self._socket.send(TruncateSession(engine_session, n_tokens))
        try:
            held = await asyncio.wait_for(answer, TRUNCATE_TIMEOUT_S)
        except TimeoutError:
            log.warning("truncation_unanswered session=%s", engine_session)
            return False
        finally:
            del self._asked[engine_session]
        if held != n_tokens:
            log.warning("truncation_refused session=%s n_tokens=%d", engine_session, n_tokens)
        return held == n_tokens

    def answered(self, report: Truncated) -> None:
        answer = self._asked.get(report.session)
        if answer is not None and not answer.done():
            answer.set_result(report.n_tokens)
