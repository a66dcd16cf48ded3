"""Which copies in lent pages move to the host: when those pages are short, or recalled.

In: copies in lent pages, and the expected next use of their sessions. Out: moves, and copies that
are dropped because the device has their tokens, or for want of room or time.
Owner: one PeerEviction per session tier that borrows.
"""

from typing import Any

from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.session.kv_record import n_on_device
from sglang_live.bridge.tiers.host_eviction import HostEviction
from sglang_live.extensions.lending.engine.peer_copies import PeerCopies
from sglang_live.kv.victim_index import VictimIndex

# Copies move to the host while a smaller share of the leases' slots is free.
_FREE_SHARE = 0.1


class PeerEviction:
    """
    Args:
        sessions: the SessionCache whose copies these are.
        host: where copies move.
    """

    def __init__(self, sessions: Any, copies: PeerCopies, host: HostEviction):
        self._sessions = sessions
        self._copies = copies
        self._host = host
        self.counts = dict.fromkeys(("peer_tokens_dropped", "peer_tokens_lost"), 0.0)
        self.reset()

    def reset(self) -> None:
        self._order = VictimIndex(self._copies.page_size)
        self._last_use_s: dict[str, float] = {}
        self._deferred: dict[str, None] = {}

    def used(self, session_id: str) -> None:
        """To be called when a turn of the session has been copied."""
        self._last_use_s[session_id] = self._idle.now_s
        self.changed(session_id)

    def changed(self, session_id: str) -> None:
        """To be called when the session's copy or its expected next use has changed."""
        copy = self._copies.of(session_id)
        if copy is None:
            self._order.remove(session_id)
            self._last_use_s.pop(session_id, None)
            return
        self._order.put(
            session_id,
            n_tokens=len(copy.slots),
            last_use_s=self._last_use_s.get(session_id, self._idle.now_s),
            next_use_s=self._idle.expected_s(session_id),
            whole=True,
        )

    def move_if_short(self) -> None:
        """Begin to move the copy that is expected last, if lent pages are short.

        To be called once a round.
        """
        for session_id in list(self._deferred):
            self.changed(session_id)
        self._deferred.clear()
        slots = self._copies.slots
        if not slots.n_open or slots.n_free >= _FREE_SHARE * slots.n_open:
            return
        candidate = self._order.peek(self._idle.now_s)
        if candidate is None:
            return
        session_id = str(candidate.key)
        if not self.move(session_id, may_drop=False):
            self._order.remove(session_id)
            self._deferred[session_id] = None

    def by_next_use(self, session_ids: list[str]) -> list[str]:
        """Sorted: the session that is expected first is first."""
        now_s = self._idle.now_s

        def remaining_s(session_id: str) -> float:
            expected_s = self._idle.expected_s(session_id)
            if expected_s is None:
                return now_s - self._last_use_s.get(session_id, now_s)
            return abs(expected_s - now_s)

        return sorted(session_ids, key=remaining_s)

    def move(self, session_id: str, *, may_drop: bool) -> bool:
        """Begin to move a copy to the host.

        Args:
            may_drop: drop it if the device has its tokens, or if the host is full.
        Returns:
            False if the copy is busy, or has to stay.
        """
        copy, host = self._copies.of(session_id), self._host.copies
        if copy is None:
            return True
        if copy.busy:
            return False
        if may_drop and self.n_on_device(session_id) >= copy.end:
            self.drop(session_id)
            return True
        if self._copies.move(session_id, host):
            self.changed(session_id)
            self._host.used(session_id)
            return True
        if may_drop:
            self.drop(session_id)
        return may_drop

    def drop(self, session_id: str) -> None:
        """Drop a copy. What the device does not have is computed again."""
        copy = self._copies.of(session_id)
        assert copy is not None
        lost = max(0, copy.end - max(copy.begin, self.n_on_device(session_id)))
        self.counts["peer_tokens_dropped"] += copy.end - copy.begin
        self.counts["peer_tokens_lost"] += lost
        self._copies.forget(session_id)
        self.changed(session_id)
        if self.n_on_device(session_id):
            self._sessions.tier.set_idle(session_id)  # it is copied again

    def n_on_device(self, session_id: str) -> int:
        return n_on_device(self._sessions.slots, session_id)

    @property
    def host_rate(self) -> float | None:
        """Bytes per second to the host; None: not measured yet."""
        return self._host.copies.to_tier.bytes_per_s

    @property
    def _idle(self) -> IdleSessions:
        idle: IdleSessions = self._sessions.idle
        return idle
