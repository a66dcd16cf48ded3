"""Eviction of host copies: which of them move to storage, or are dropped, under memory pressure.

In: sessions' host copies, and their expected next use. Out: host memory for sessions that are
needed earlier. A storage tier that is fast enough prevents the loss of copies.
Owner: one HostEviction per session tier.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.session.kv_record import n_on_device
from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.bridge.tiers.storage import NoStorage
from sglang_live.kv.victim_index import VictimIndex

# Tails move to storage while a smaller share of the host's pool is free: new copies then find
# memory without waiting.
_FREE_SHARE = 0.2


class HostEviction:
    """
    Args:
        sessions: the SessionCache whose copies these are.
        stored: the storage tier.
    """

    def __init__(self, sessions: Any, copies: HostCopies, stored: NoStorage):
        self._sessions = sessions
        self.copies = copies
        self._stored = stored
        copies.make_room = self.make
        self.counts = dict.fromkeys(("tokens_dropped_on_host", "dropped_tokens_lost"), 0.0)
        self.reset()

    def reset(self) -> None:
        self._order = VictimIndex(self.copies.page_size)
        self._last_use_s: dict[str, float] = {}
        # Victims that were busy with a transfer, in an order that is the same on all ranks.
        self._deferred: dict[str, None] = {}

    def used(self, session_id: str) -> None:
        """To be called when a turn of the session has been copied."""
        self._last_use_s[session_id] = self._now_s
        self.changed(session_id)

    def changed(self, session_id: str) -> None:
        """To be called when the session's host copy or its expected next use has changed."""
        self._stored.forget_unless_contiguous(session_id)
        copy = self.copies.of(session_id)
        if copy is None:
            self._order.remove(session_id)
            self._last_use_s.pop(session_id, None)
            return
        self._order.put(
            session_id,
            n_tokens=len(copy.slots),
            last_use_s=self._last_use_s.get(session_id, self._now_s),
            next_use_s=self._idle.expected_s(session_id),
        )

    @contextmanager
    def keeping(self, session_id: str) -> Iterator[None]:
        """A context in which the session's copy is not evicted: making room on the device for a
        load may evict other sessions to the host.
        """
        self._order.remove(session_id)
        try:
            yield
        finally:
            self.changed(session_id)

    def make(self, session_id: str, n_slots: int) -> None:
        """Drop copies of sessions that are expected after this one, without waiting."""
        self._order.remove(session_id)
        needed_s = self._idle.expected_s(session_id)
        later_than_s = self._now_s if needed_s is None else needed_s
        for victim in self._order.victims(n_slots, self._now_s, later_than_s=later_than_s):
            victim_id = str(victim.key)
            copy = self.copies.of(victim_id)
            assert copy is not None  # changed() keeps sessions without a copy out of the order
            if copy.busy:
                self._deferred[victim_id] = None
                continue
            end = copy.begin + len(copy.slots) - victim.n_tokens
            self.counts["tokens_dropped_on_host"] += copy.end - end
            on_device = n_on_device(self._sessions.slots, victim_id)
            self.counts["dropped_tokens_lost"] += max(0, copy.end - max(end, on_device))
            self.copies.shorten(victim_id, end)
            self._stored.forget_unless_contiguous(victim_id)

    def store_if_short(self) -> None:
        """Begin to store the copy that is expected last, if the host's memory is short.

        To be called once a round.
        """
        for session_id in list(self._deferred):
            self.changed(session_id)
        self._deferred.clear()
        copies, stored = self.copies, self._stored
        short = _FREE_SHARE * copies.pool.size - copies.n_free_slots - stored.n_storing_tokens
        candidate = self._order.peek(self._now_s) if short > 0 else None
        if candidate is None:
            return
        n_pages = min(candidate.n_tokens, ceil_align(int(short) + 1, copies.page_size))
        n_pages = min(n_pages // copies.page_size, stored.n_free_pages)
        if n_pages == 0:
            return
        session_id = str(candidate.key)
        self._order.remove(session_id)  # until settle() reports the end of the transfer
        if not stored.store(session_id, n_pages):
            self._deferred[session_id] = None

    @property
    def _idle(self) -> IdleSessions:
        idle: IdleSessions = self._sessions.idle
        return idle

    @property
    def _now_s(self) -> float:
        return self._idle.now_s
