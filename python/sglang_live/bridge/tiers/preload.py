"""Preloads: KV is loaded from the host while the user still speaks, or before playback ends.

In: speech starts and next-use hints, the round's time and the link's measured rate. Out: preloads
of the tier. Every decision depends on broadcast facts only, so all ranks decide alike.
Owner: one Preloads per session cache, if the engine has a HiCache. LiveServe section 5.2.
"""

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import Any

from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.round_facts import UNMEASURED_LINK, LinkRate
from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.tiers.host import SessionTier
from sglang_live.kv.preload import (
    PROTECTED_S,
    REMAINING_SPEECH_S,
    RESERVE_SHARE,
    Admit,
    PreloadConfig,
    PreloadView,
    Wait,
    judge,
)

# A round that waited for input is longer, and says nothing about the next one.
_LONGEST_ROUND_S = 0.1
# Time before the transfer must begin, in which a preload may wait for memory.
_PRELOAD_MARGIN_S = 1.0


@dataclass(slots=True)
class _Pending:
    """A preload that is not decided yet.

    Attributes:
        number: of its reviews; a review with another number is stale.
        due_at_s: time from which it may wait for memory.
        needed_at_s: when the session's KV is expected to be needed.
        waits_for: reason of the latest decision to wait; empty before the first.
    """

    number: int
    due_at_s: float
    needed_at_s: float
    waits_for: str = ""


@dataclass(slots=True)
class _Loading:
    """A preload that has begun.

    Attributes:
        needed_at_s: when the session's KV is expected to be needed.
        until_s: end of the protection of what has been loaded.
        n_left: tokens that are still to be loaded until the session is judged again.
        limited_by: why these are not all of its tokens.
    """

    needed_at_s: float
    until_s: float
    n_left: int
    limited_by: str


class Preloads:
    """
    Args:
        sessions: a SessionCache; with a tier, if it is on.
        is_on: otherwise nothing is ever preloaded.
    """

    def __init__(self, sessions: Any, config: PreloadConfig | None = None, *, is_on: bool = True):
        self._sessions = sessions
        self._config = config or PreloadConfig()
        self.is_on = is_on
        self._pending: dict[str, _Pending] = {}
        self._reviews: list[tuple[float, int, str]] = []  # heap of (time, number, session)
        self._numbers = itertools.count()
        # Preloaded KV that is not used yet, by session: (end of its protection, tokens).
        self._unused: dict[str, tuple[float, int]] = {}
        self._loading: dict[str, _Loading] = {}
        self._now_s = self._round_s = 0.0
        self.rate = self.nearer_rate = UNMEASURED_LINK
        self.counts: dict[str, float] = {}

    def speech_started(self, session_id: str, now_s: float) -> None:
        """Schedule a preload: a request will follow when the user has finished speaking."""
        if not self.is_on:
            return
        loading = self._loading.get(session_id)
        if loading is not None:
            loading.needed_at_s = now_s + REMAINING_SPEECH_S
            self._protect(session_id, loading, now_s)
            return
        self._schedule(session_id, now_s, now_s, now_s + REMAINING_SPEECH_S)
        # An idle engine's next round may be a second away.
        self.tick(now_s, self.rate, self.nearer_rate)

    def expect(self, session_id: str, now_s: float, needed_at_s: float | None) -> None:
        """Schedule a preload of an idle session, early enough for a wait and the transfer.

        Args:
            needed_at_s: when the KV is expected to be needed; None if unknown: no preload.
        """
        if not self.is_on or session_id in self._loading:
            return
        n_tokens = self._tier.loads.tokens_to_preload(session_id)
        rate = self._rate(session_id)
        if needed_at_s is None or n_tokens == 0 or rate.bytes_per_s is None:
            return
        pending = self._pending.get(session_id)
        if pending is not None and pending.due_at_s <= now_s:
            return  # it waits for memory already, perhaps because its user speaks
        cost_s = n_tokens * self._tier.copies.bytes_per_token / rate.bytes_per_s
        due_at_s = max(now_s, needed_at_s - self._config.safety * cost_s - _PRELOAD_MARGIN_S)
        self._schedule(session_id, due_at_s, due_at_s, needed_at_s)

    def forget(self, session_id: str) -> None:
        """To be called when the session's request has come, or when it is closed."""
        pending = self._pending.pop(session_id, None)
        if pending is not None and pending.waits_for:
            self._count(f"preloads_overtaken_{pending.waits_for}")
        if self._loading.pop(session_id, None) is not None:
            self._count("preloads_overtaken_link")
        self._unused.pop(session_id, None)

    def cancel(self, session_id: str) -> None:
        """The user does not speak after all. What has been loaded stays, without protection."""
        pending = self._pending.pop(session_id, None)
        loading = self._loading.pop(session_id, None)
        if self._unused.pop(session_id, None) is not None:
            self._idle.unprotect(session_id)
        self._count("preloads_cancelled", pending is not None or loading is not None)

    def tick(self, now_s: float, rate: LinkRate, nearer_rate: LinkRate = UNMEASURED_LINK) -> None:
        """Begin a round.

        Args:
            rate: of the link from the host, as rank 0 measured it.
            nearer_rate: of that from a nearer tier.
        """
        self.rate = rate
        self.nearer_rate = nearer_rate
        if now_s > self._now_s:
            self._round_s, self._now_s = now_s - self._now_s, now_s
        while self._reviews and self._reviews[0][0] <= now_s:
            _, number, session_id = heapq.heappop(self._reviews)
            if not self._is_stale(number, session_id):
                self._review(session_id, self._pending[session_id], now_s)

    @property
    def waits_for_room(self) -> bool:
        """Whether KV of a user who speaks waits for memory."""
        waiting = (self._pending.get(session_id) for session_id in self._idle.speaking())
        return any(one is not None and one.waits_for == "memory" for one in waiting)

    @property
    def next_review_s(self) -> float:
        """When the next preload is judged; inf: none is pending."""
        while self._reviews and self._is_stale(*self._reviews[0][1:]):
            heapq.heappop(self._reviews)
        return self._reviews[0][0] if self._reviews else math.inf

    def _is_stale(self, number: int, session_id: str) -> bool:
        pending = self._pending.get(session_id)
        return pending is None or pending.number != number

    def _schedule(
        self,
        session_id: str,
        review_s: float,
        due_at_s: float,
        needed_at_s: float,
        waits_for: str = "",
    ) -> None:
        number = next(self._numbers)
        self._pending[session_id] = _Pending(number, due_at_s, needed_at_s, waits_for)
        heapq.heappush(self._reviews, (review_s, number, session_id))

    def _review(self, session_id: str, pending: _Pending, now_s: float) -> None:
        if self._idle.is_speaking(session_id):
            pending.needed_at_s = now_s + REMAINING_SPEECH_S
        view = self._view(session_id, pending.needed_at_s, now_s)
        verdict = judge(view, self._config)
        if isinstance(verdict, Wait):
            pending.waits_for = verdict.reason
            heapq.heappush(self._reviews, (verdict.until_s, pending.number, session_id))
            return
        del self._pending[session_id]
        if not isinstance(verdict, Admit):
            self._count(f"preloads_skipped_{verdict.reason}")
            return
        n_unused = view.own_tokens + verdict.n_tokens
        self._unused[session_id] = (now_s + PROTECTED_S, n_unused)
        loading = _Loading(pending.needed_at_s, now_s, verdict.n_tokens, verdict.limited_by)
        self._loading[session_id] = loading
        self._protect(session_id, loading, now_s)

    def _protect(self, session_id: str, loading: _Loading, now_s: float) -> None:
        loading.until_s = now_s + PROTECTED_S
        self._idle.protect(session_id, loading.until_s)

    # --- transfers ---

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def load(self) -> None:
        """Add transfers of the preloads that are needed first, while few are in flight.

        To be called once a round, behind the loads that the round's prefill waits for.
        """
        if self._loading:
            for nearer in (True, False):
                self._load_over(nearer)

    def _load_over(self, nearer: bool) -> None:
        """Add transfers over one link: from a nearer tier, or from the host."""
        tier = self._tier
        rate = self.nearer_rate if nearer else self.rate
        loading = [sid for sid in self._loading if tier.is_nearer(sid) == nearer]
        if not loading or rate.bytes_per_s is None:
            return
        window_s = max(self._config.in_flight_s, min(self._round_s, _LONGEST_ROUND_S))
        n_bytes, page_size = tier.copies.bytes_per_token, self._sessions.cache.page_size
        window_tokens = int(window_s * rate.bytes_per_s / n_bytes)
        room = max(page_size, window_tokens) - tier.all.bytes_in_transfer(nearer) // n_bytes
        while room > 0 and loading:
            session_id = min(loading, key=lambda sid: self._loading[sid].needed_at_s)
            room -= self._load(session_id, ceil_align(room, page_size))
            loading = [
                sid for sid in loading if sid in self._loading and tier.is_nearer(sid) == nearer
            ]

    def _load(self, session_id: str, most_tokens: int) -> int:
        """Load part of a session's KV, or end its preload. Returns the number of tokens."""
        loading, loads = self._loading[session_id], self._tier.loads
        n_tokens = min(
            loads.tokens_to_preload(session_id),
            most_tokens,
            ceil_align(loading.n_left, self._sessions.cache.page_size),
        )
        n_loaded = 0
        if n_tokens and loads.has_spare_row(session_id):
            with loads.keeping(session_id):
                self._make_room(n_tokens, loading.needed_at_s)
            n_loaded = loads.preload(session_id, n_tokens)
        if n_loaded:
            loading.n_left -= n_loaded
            self._sessions.resized(session_id)
            self._idle.protect(session_id, loading.until_s)
        if loads.tokens_to_preload(session_id) == 0:
            del self._loading[session_id]
            loads.counts["preloads"] += n_loaded > 0
        elif n_loaded == 0 or loading.n_left <= 0:
            # What has become of the room since it was judged, the next review finds.
            del self._loading[session_id]
            review_s = self._now_s + self._config.retry_s
            waits_for = loading.limited_by or "memory"
            self._schedule(session_id, review_s, self._now_s, loading.needed_at_s, waits_for)
            self._count("preloads_in_parts")
        return n_loaded

    def _view(self, session_id: str, needed_at_s: float, now_s: float) -> PreloadView:
        sessions, tier, config = self._sessions, self._tier, self._config
        speaks = self._idle.is_speaking(session_id)
        share = config.max_protected_share if speaks else config.max_expected_share
        n_tokens, rate = tier.loads.tokens_to_preload(session_id), self._rate(session_id)
        others_tokens, own_tokens = self._unused_tokens(session_id, now_s)
        allocator = sessions.cache.token_to_kv_pool_allocator
        free = allocator.available_size() + sessions.cache.tree_evictable_size()
        return PreloadView(
            now_s=now_s,
            needed_at_s=needed_at_s,
            n_tokens=n_tokens,
            n_bytes=n_tokens * tier.copies.bytes_per_token,
            bytes_per_s=rate.bytes_per_s,
            latency_s=rate.latency_s,
            queued_bytes=self._queued_bytes(tier.is_nearer(session_id)),
            others_tokens=others_tokens,
            own_tokens=own_tokens,
            cap_tokens=int(share * allocator.size),
            free_tokens=free - int(RESERVE_SHARE * allocator.size),
            later_tokens=self._idle.later_tokens(needed_at_s, n_tokens),
            has_row=n_tokens == 0 or tier.loads.has_spare_row(session_id),
        )

    def _rate(self, session_id: str) -> LinkRate:
        """Of the link that the session's load takes."""
        return self.nearer_rate if self._tier.is_nearer(session_id) else self.rate

    def _queued_bytes(self, nearer: bool) -> int:
        tier = self._tier
        same_link = [sid for sid in self._loading if tier.is_nearer(sid) == nearer]
        n_tokens = sum(tier.loads.tokens_to_preload(session_id) for session_id in same_link)
        return tier.all.bytes_in_transfer(nearer) + n_tokens * tier.copies.bytes_per_token

    def _unused_tokens(self, session_id: str, now_s: float) -> tuple[int, int]:
        """Tokens that are preloaded and not used yet: of other sessions, and of this one."""
        self._unused = {sid: warm for sid, warm in self._unused.items() if warm[0] > now_s}
        of_all = sum(n_tokens for _, n_tokens in self._unused.values())
        own = self._unused.get(session_id, (0.0, 0))[1]
        # Live work may have evicted some of them again.
        return of_all - own, min(own, self._idle.tokens_of(session_id))

    def _make_room(self, n_slots: int, later_than_s: float) -> None:
        """Evict what is needed later than later_than_s: unlocked leaves of the tree first."""
        sessions = self._sessions
        missing = n_slots - sessions.cache.token_to_kv_pool_allocator.available_size()
        if missing > 0:
            missing -= sessions.cache.evict_tree(missing)
        if missing > 0:
            sessions.evict_idle(missing, later_than_s=later_than_s)

    def _count(self, what: str, happened: bool = True) -> None:
        if happened:
            self.counts[what] = self.counts.get(what, 0.0) + 1

    @property
    def _tier(self) -> SessionTier:
        tier: SessionTier = self._sessions.tier
        return tier

    @property
    def _idle(self) -> IdleSessions:
        idle: IdleSessions = self._sessions.idle
        return idle

    def report(self) -> dict[str, float]:
        return dict(self.counts)
