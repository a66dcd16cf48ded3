"""Passes events of sessions to the parts of the session cache that rank, fetch and preload KV.

In: the round's stamp, next-use hints, speech starts, queued requests. Out: the measured link rate;
the waiting requests whose KV is where their prefill can begin.
Owner: one Tiers per scheduler; equal on all ranks, because its inputs are broadcast.
"""

import math
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import NextBatchPlan, Req

from sglang_live.bridge.cache.session_cache import SessionCache
from sglang_live.bridge.round_facts import LinkStamp
from sglang_live.bridge.scheduler.part import Part, Prefill
from sglang_live.messages import NextUseHint, UserSpeaking

# Longest wait for input while KV is loaded ahead: less than the transfers in flight take.
LOADING_WAIT_S = 0.005


class Tiers(Part):
    def start(self) -> None:
        self._wait_s = math.inf

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            LinkStamp: self.stamp,
            UserSpeaking: self.user_speaking,
            NextUseHint: self.next_use,
        }

    def feeds(self, now_s: float) -> list[Any]:
        return [LinkStamp(now_s, *self._sessions.tier.measured())]

    def planned(self, plan: NextBatchPlan) -> None:
        self._wait_s = self.load_ahead()

    def wait_limit_s(self) -> float:
        return self._wait_s

    def idle_limit_s(self) -> float:
        return self._wait_s

    def stamp(self, stamp: LinkStamp) -> None:
        sessions = self._sessions
        sessions.idle.tick(stamp.now_s)
        sessions.tier.stamp((stamp.rate, stamp.nearer_rate))
        sessions.preloads.tick(stamp.now_s, stamp.rate, stamp.nearer_rate)

    def next_use(self, hint: NextUseHint) -> None:
        sessions = self._sessions
        session_id = hint.session_id
        if not self._plans_for(session_id):
            return
        sessions.idle.expect(hint)
        sessions.tier.expect(session_id)
        self._expect(session_id)

    def user_speaking(self, news: UserSpeaking) -> None:
        sessions = self._sessions
        session_id = news.session_id
        if not self._plans_for(session_id):
            return
        if news.speaks:
            sessions.idle.speech_started(session_id)
            if sessions.preloads.is_on:
                sessions.tier.fetch(session_id)
                sessions.preloads.speech_started(session_id, sessions.idle.now_s)
        else:
            sessions.idle.speech_dismissed(session_id)
            sessions.preloads.cancel(session_id)
            self._expect(session_id)

    def _expect(self, session_id: str) -> None:
        idle = self._sessions.idle
        needed_s = idle.expected_s(session_id)
        self._sessions.preloads.expect(session_id, idle.now_s, needed_s)

    def _plans_for(self, session_id: str) -> bool:
        """Whether idle sessions are evicted, and this one is open. A message may come after its
        end; nothing would remove what it adds then."""
        is_open = session_id in self._scheduler.session_controller
        return self._sessions.evicts_idle and is_open

    def load_ahead(self) -> float:
        """Load KV ahead; to be called once a round, when its batch is chosen.

        Returns:
            Seconds until the next round must begin, because more is to be loaded or copied, a
            preload is to be judged, or a nearer tier is draining; inf: when there is input.
        """
        preloads = self._sessions.preloads
        tier = self._sessions.tier
        preloads.load()
        limit_s = max(0.0, preloads.next_review_s - self._sessions.idle.now_s)
        is_moving = tier.fetches_any or tier.copies_any or tier.is_draining
        if preloads.is_loading or is_moving:
            limit_s = min(limit_s, LOADING_WAIT_S)
        return limit_s

    def queues(self, req: Req, is_retracted: bool) -> None:
        if req.session is not None:
            self._sessions.tier.fetch(req.session.session_id)

    def narrow(self, prefill: Prefill) -> None:
        """Requests whose KV is read from storage wait for it."""
        tier = self._sessions.tier
        if tier.fetches_any:
            later = [
                r for r in prefill.queue if r.session and tier.is_fetching(r.session.session_id)
            ]
            prefill.narrow([req for req in prefill.queue if req not in later], later)

    @property
    def _sessions(self) -> SessionCache:
        sessions: SessionCache = self._scheduler.tree_cache.session
        return sessions
