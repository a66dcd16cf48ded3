"""A session's copies on all tiers below the device: lent pages, if there are any, and the host.

A session has its copy on one of them, and on both only while it moves. Owner: the SessionTier.
"""

from sglang.srt.managers.cache_controller import HiCacheAck

from sglang_live.bridge.round_facts import LinkRate
from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.bridge.tiers.peer_copies import PeerCopies
from sglang_live.bridge.tiers.session_copies import SessionCopies, SessionCopy

Found = tuple[SessionCopies, SessionCopy]


class TierCopies:
    """
    Attributes:
        host: copies in host memory.
        peer: copies in lent pages; None if the engine does not borrow.
        rates: of the links from the host and from lent pages, as rank 0 has measured them; None
            before the first round.
    """

    rates: tuple[LinkRate, LinkRate] | None = None

    def __init__(self, host: HostCopies, peer: PeerCopies | None):
        self.host, self.peer = host, peer
        self._tiers: tuple[SessionCopies, ...] = (host,) if peer is None else (peer, host)

    def of(self, session_id: str) -> list[Found]:
        """The session's copies, with their tiers."""
        return [(tier, copy) for tier in self._tiers if (copy := tier.of(session_id)) is not None]

    def behind(self, session_id: str, n_device: int) -> Found | None:
        """The copy that continues the device's part, with its tier: of two the longer, and of equal
        ones that of the faster link.
        """
        # Eviction frees whole pages; a session that ends within a page has all of it on the device.
        if n_device % self.host.page_size:
            return None
        found = [one for one in self.of(session_id) if one[1].begin <= n_device < one[1].end]
        return max(found, key=lambda one: (one[1].end, self._rate(one[0])), default=None)

    def _rate(self, tier: SessionCopies) -> float:
        rate = tier.rate() if self.rates is None else self.rates[tier is self.peer]
        return rate.bytes_per_s or 0.0

    def is_from_peer(self, found: Found | None) -> bool:
        return found is not None and found[0] is self.peer

    def bytes_in_transfer(self, on_peer: bool) -> int:
        """Bytes of loads that have not ended, from lent pages or from the host."""
        of_peer = 0 if self.peer is None else self.peer.loading_bytes
        return of_peer if on_peer else self.host.bytes_to_device - of_peer

    def is_loading(self, session_id: str) -> bool:
        """Whether a load of the session has not ended; equal on all ranks."""
        return any(tier.loads_from(copy) for tier, copy in self.of(session_id))

    # --- SGLang acknowledges ---

    def measure_load(self, ack: HiCacheAck) -> None:
        """Measure loads. Those of several tiers at once say nothing of one link."""
        peer = self.peer
        if peer is not None and peer.is_loading(ack):
            peer.measure(ack, peer.to_device)
        elif peer is None or not peer.loads_any(ack):
            self.host.measure(ack, self.host.to_device)

    def measure_write(self, ack: HiCacheAck) -> None:
        peer = self.peer
        is_move = self.host.is_writing(ack)  # of both, over the host's link
        if peer is not None and peer.is_writing(ack) and not is_move:
            peer.measure(ack, peer.to_tier)
        else:
            self.host.measure(ack, self.host.to_tier)

    def acknowledged(self, transfer: int) -> bool:
        """Record the end of a transfer. Returns False if it is not a session's."""
        # A move from lent pages to the host is a transfer of both.
        return any([tier.acknowledged(transfer) for tier in self._tiers])

    def all_written(self) -> None:
        """To be called when SGLang has waited for every write in its queue, and emptied it."""
        for tier in self._tiers:
            tier.all_written()
