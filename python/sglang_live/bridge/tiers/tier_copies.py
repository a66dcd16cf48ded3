"""A session's copies on all tiers below the device: the host, and what may be nearer.

A session has its copy on one of them, and on two only while it moves. Owner: the SessionTier.
"""

from sglang.srt.managers.cache_controller import HiCacheAck

from sglang_live.bridge.round_facts import UNMEASURED_LINK, LinkRate
from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.bridge.tiers.session_copies import SessionCopies, SessionCopy

Found = tuple[SessionCopies, SessionCopy]


class TierCopies:
    """
    Attributes:
        host: copies in host memory.
        nearer: copies on a tier between the device and the host; empty: there is none.
        rates: of the links from the host and from a nearer tier, as rank 0 has measured them.
    """

    rates: tuple[LinkRate, LinkRate] = (UNMEASURED_LINK, UNMEASURED_LINK)

    def __init__(self, host: HostCopies, nearer: tuple[SessionCopies, ...] = ()):
        self.host = host
        self.nearer = nearer

    @property
    def tiers(self) -> tuple[SessionCopies, ...]:
        """The nearest first."""
        return (*self.nearer, self.host)

    def nearer_rate(self) -> LinkRate:
        """The rate from the nearer tier that this rank has measured."""
        return next((tier.rate() for tier in self.nearer), UNMEASURED_LINK)

    def of(self, session_id: str) -> list[Found]:
        """The session's copies, with their tiers."""
        return [(tier, copy) for tier in self.tiers if (copy := tier.of(session_id)) is not None]

    def behind(self, session_id: str, n_device: int) -> Found:
        """The copy that continues the device's part, with its tier: of two the longer, and of equal
        ones that of the faster link. An empty one of the host, if there is none.
        """
        found = self.of(session_id)
        # Eviction frees whole pages; a session that ends within a page has all of it on the device.
        if n_device % self.host.page_size:
            found = []
        found = [one for one in found if one[1].begin <= n_device < one[1].end]
        if not found:
            return self.host, SessionCopy.empty(n_device)
        return max(found, key=lambda one: (one[1].end, self._rate(one[0])))

    def _rate(self, tier: SessionCopies) -> float:
        return self.rates[tier is not self.host].bytes_per_s or 0.0

    def is_nearer(self, found: Found) -> bool:
        return found[0] is not self.host

    def bytes_in_transfer(self, nearer: bool) -> int:
        """Bytes of loads that have not ended, from a nearer tier or from the host."""
        of_nearer = sum(tier.loading_bytes for tier in self.nearer)
        return of_nearer if nearer else self.host.bytes_to_device - of_nearer

    def is_loading(self, session_id: str) -> bool:
        """Whether a load of the session has not ended; equal on all ranks."""
        return any(tier.loads_from(copy) for tier, copy in self.of(session_id))

    # --- SGLang acknowledges ---

    def measure_load(self, ack: HiCacheAck) -> None:
        """Measure loads. Those of several tiers at once say nothing of one link."""
        for tier in self.nearer:
            if tier.is_loading(ack):
                tier.measure(ack, tier.to_device)
        if not any(tier.loads_any(ack) for tier in self.nearer):
            self.host.measure(ack, self.host.to_device)

    def measure_write(self, ack: HiCacheAck) -> None:
        # A move is a write to the host as well, over the host's link.
        nearer = [] if self.host.is_writing(ack) else self.nearer
        target = next((tier for tier in nearer if tier.is_writing(ack)), self.host)
        target.measure(ack, target.to_tier)

    def acknowledged(self, transfer: int) -> bool:
        """Record the end of a transfer. Returns False if it is not a session's."""
        # A move from a nearer tier to the host is a transfer of both.
        return any([tier.acknowledged(transfer) for tier in self.tiers])

    def all_written(self) -> None:
        """To be called when SGLang has waited for every write in its queue, and emptied it."""
        for tier in self.tiers:
            tier.all_written()
