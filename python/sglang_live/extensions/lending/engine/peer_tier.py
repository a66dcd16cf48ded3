"""The tier of lent pages of one session cache: copies, eviction and leases together.

Owner: the SessionTier of an engine that borrows.
"""

from sglang_live.bridge.tiers.nearer import NearerTier
from sglang_live.extensions.lending.engine.borrowing import Borrowing
from sglang_live.extensions.lending.engine.peer_copies import PeerCopies
from sglang_live.extensions.lending.engine.peer_eviction import PeerEviction


class PeerTier(NearerTier):
    def __init__(self, copies: PeerCopies, eviction: PeerEviction, leases: Borrowing):
        self.copies = (copies,)
        self._copies = copies
        self._eviction = eviction
        self._leases = leases

    @property
    def is_draining(self) -> bool:
        return self._leases.is_draining

    def reset(self) -> None:
        """Leases stay."""
        self._copies.reset()
        self._eviction.reset()

    def step(self) -> None:
        self._leases.step()
        self._eviction.move_if_short()

    def used(self, session_id: str) -> None:
        self._eviction.used(session_id)

    def changed(self, session_id: str) -> None:
        self._eviction.changed(session_id)

    def report(self) -> dict[str, float]:
        return {**self._copies.report(), **self._eviction.counts, **self._leases.report()}
