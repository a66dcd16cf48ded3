"""Room on the host: whose copies go to storage, or go, when there are too many.

In: sessions' host copies, and when their callers are expected. Out: memory for those who are
expected before. With storage nobody's copy goes for good as long as it keeps pace.
Owner: one HostEviction per session tier.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.bridge.tiers.storage import StoredTails
from sglang_live.kv.victim_index import VictimIndex

# Of the host's pool: tails go to storage when less of it is free, so that whoever comes finds
# room at once.
_FREE_SHARE = 0.2


class HostEviction:
    """
    Args:
        sessions: the LiveSession.
        stored: None: there is no storage.
    """

    def __init__(self, sessions, copies: HostCopies, stored: StoredTails | None):
        self._sessions, self._copies, self._stored = sessions, copies, stored
        copies.make_room = self.make
        self.counts = dict.fromkeys(("tokens_dropped_on_host", "dropped_tokens_lost"), 0.0)
        self.reset()

    def reset(self) -> None:
        self._order = VictimIndex(self._copies.page_size)
        self._last_use_s: dict[str, float] = {}
        # Those whose turn it was in the middle of a transfer; in order, the same on all ranks.
        self._put_off: dict[str, None] = {}

    def used(self, session_id: str) -> None:
        """To be called when a turn of the session has been copied."""
        self._last_use_s[session_id] = self._now_s
        self.changed(session_id)

    def changed(self, session_id: str) -> None:
        """To be called when its host copy changed, or what is expected of its caller."""
        if self._stored is not None:
            self._stored.keep_if_behind(session_id)
        copy = self._copies.of(session_id)
        if copy is None:
            self._order.remove(session_id)
            self._last_use_s.pop(session_id, None)
            return
        self._order.put(
            session_id,
            n_tokens=len(copy.slots),
            last_use_s=self._last_use_s.get(session_id, self._now_s),
            next_use_s=self._sessions.idle.expected_s(session_id),
        )

    @contextmanager
    def keeping(self, session_id: str) -> Iterator[None]:
        """While room is made on the device for what comes back, others give way on the host, and
        must not take it from there."""
        self._order.remove(session_id)
        try:
            yield
        finally:
            self.changed(session_id)

    def make(self, session_id: str, n_slots: int) -> None:
        """At once, by dropping copies of those that are expected after that session."""
        self._order.remove(session_id)
        needed_s = self._sessions.idle.expected_s(session_id)
        later_than_s = self._now_s if needed_s is None else needed_s
        for victim in self._order.victims(n_slots, self._now_s, later_than_s=later_than_s):
            copy = self._copies.of(victim.key)
            if copy.busy:
                self._put_off[victim.key] = None
                continue
            end = copy.begin + len(copy.slots) - victim.n_tokens
            self.counts["tokens_dropped_on_host"] += copy.end - end
            on_device = self._n_on_device(victim.key)
            self.counts["dropped_tokens_lost"] += max(0, copy.end - max(end, on_device))
            self._copies.shorten(victim.key, end)
            if self._stored is not None:
                self._stored.keep_if_behind(victim.key)

    def store_some(self) -> None:
        """Once a round: begin to move whoever is expected last, if the host is short of room."""
        for session_id in list(self._put_off):
            self.changed(session_id)
        self._put_off.clear()
        if self._stored is None:
            return
        copies, stored = self._copies, self._stored
        short = _FREE_SHARE * copies.pool.size - copies.n_free_slots - stored.n_storing_tokens
        candidate = self._order.peek(self._now_s) if short > 0 else None
        if candidate is None:
            return
        n_pages = min(candidate.n_tokens, ceil_align(int(short) + 1, copies.page_size))
        n_pages = min(n_pages // copies.page_size, stored.n_free_pages)
        if n_pages == 0:
            return
        self._order.remove(candidate.key)  # on its way; settle() says when that is over
        if not stored.store(candidate.key, n_pages):
            self._put_off[candidate.key] = None

    def _n_on_device(self, session_id: str) -> int:
        slot = self._sessions.slots.get(session_id)
        return 0 if slot is None else slot.kv.kv_committed_len

    @property
    def _now_s(self) -> float:
        return self._sessions.idle.now_s
