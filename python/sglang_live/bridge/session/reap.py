"""Closes sessions whose time is over, and those whose last request has ended, on all ranks alike.

SGLang does this once a second by the clock of each rank: ranks would free the same KV in different
rounds, and decide differently while memory is short.
In: rank 0's clock. Out: ReapSessions, sent with the request broadcast; closed sessions.
Owner: one SessionReaper per scheduler.
"""

import math
from dataclasses import dataclass
from typing import Any

_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class ReapSessions:
    """Rank 0's order to close sessions.

    Attributes:
        timed_out: ids of sessions that were unused for their timeout.
    """

    timed_out: list[str]


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
