"""SGLang's streaming sessions in the scheduler: truncated, measured and closed on all ranks alike.

SGLang closes sessions whose time is over, and those whose last request has ended, once a second by
the clock of each rank: ranks would free the same KV in different rounds, and decide differently
while memory is short.
In: orders of the stage; rank 0's clock. Out: ReapSessions, sent with the request broadcast; closed
sessions. Owner: one Sessions per scheduler.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.schedule_batch import Req

from sglang_live.bridge.cache.session_cache import SessionCache
from sglang_live.bridge.cache.truncate import n_computed, streaming_sessions, truncate_session
from sglang_live.bridge.scheduler.part import Part
from sglang_live.messages import MeasureKv, SessionKv, Truncated, TruncateSession, UserSpeaking

log = logging.getLogger(__name__)

_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class ReapSessions:
    """Rank 0's order to close sessions.

    Attributes:
        timed_out: ids of sessions that were unused for their timeout.
    """

    timed_out: list[str]


class Sessions(Part):
    def start(self) -> None:
        self._reaper = SessionReaper(self._scheduler.session_controller)
        names = ("truncated", "truncations_refused", "speech_starts")
        self._counts = dict.fromkeys(names, 0.0)

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            ReapSessions: self._reaper.reap,
            TruncateSession: self._on_truncate,
            MeasureKv: self._on_measure_kv,
            UserSpeaking: self._on_user_speaking,
        }

    def feeds(self, now_s: float) -> list[Any]:
        return self._reaper.due(now_s)

    def aborted(self, req: Req) -> None:
        sessions = streaming_sessions(self._scheduler.tree_cache)
        if req.retracted_stain and not req.finished() and isinstance(sessions, SessionCache):
            sessions.drop(req)

    def _on_truncate(self, order: TruncateSession) -> None:
        n_tokens = truncate_session(self._scheduler, order.session_id, order.n_tokens)
        self._counts["truncated" if n_tokens >= 0 else "truncations_refused"] += 1
        if self._scheduler.is_first_rank:
            log.info("session_truncated session=%s n_tokens=%d", order.session_id, n_tokens)
        self._scheduler.channel.send(Truncated(order.session_id, n_tokens, order.ask_id))

    def _on_measure_kv(self, order: MeasureKv) -> None:
        streaming = streaming_sessions(self._scheduler.tree_cache)
        n_tokens = n_computed(streaming, order.session_id)
        self._scheduler.channel.send(SessionKv(order.session_id, n_tokens, order.ask_id))

    def _on_user_speaking(self, news: UserSpeaking) -> None:
        self._counts["speech_starts"] += news.speaks

    def totals(self) -> dict[str, float]:
        return self._counts


class SessionReaper:
    """
    Args:
        controller: SGLang's SessionController, which no longer closes sessions by itself.
    """

    def __init__(self, controller: Any):
        self._controller = controller
        self._last_s = -math.inf
        controller.maybe_reap = lambda now, interval=1.0: None

    def due(self, now_s: float) -> list[ReapSessions]:
        """The order that is due now; to be called on rank 0 alone."""
        if now_s - self._last_s <= _EVERY_S:
            return []
        self._last_s = now_s
        sessions = self._controller.sessions
        timed_out = [sid for sid, session in sessions.items() if session.is_timed_out()]
        closing = any(session.close_on_finish for session in sessions.values())
        return [ReapSessions(timed_out)] if timed_out or closing else []

    def reap(self, order: ReapSessions) -> None:
        controller = self._controller
        for session_id, session in list(controller.sessions.items()):
            if session.close_on_finish and controller._all_requests_finished(session):
                session.close_on_finish = False  # SGLang's _close() otherwise defers it again
                controller._close(session_id)
        for session_id in order.timed_out:
            if session_id in controller:
                controller._close(session_id)
