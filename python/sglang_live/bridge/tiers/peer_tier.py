"""The tier of lent pages of one session cache: copies, eviction and leases together.

Owner: the SessionTier, if the engine borrows.
"""

import logging
import os
from collections.abc import Iterator
from typing import Any

from sglang_live.bridge.tiers.borrowing import Borrowing
from sglang_live.bridge.tiers.host_eviction import HostEviction
from sglang_live.bridge.tiers.lease_facts import member_of, unsupported_ranks
from sglang_live.bridge.tiers.peer_copies import PeerCopies, is_supported
from sglang_live.bridge.tiers.peer_eviction import PeerEviction
from sglang_live.bridge.tiers.peer_memory import geometry_of
from sglang_live.engine_channel.inbox import STAGE_ENV
from sglang_live.engine_channel.lease_channel import BORROW, LEASES_ENV
from sglang_live.kv.peer_layout import refusal

logger = logging.getLogger(__name__)


class PeerTier:
    """
    Attributes:
        leases: what is borrowed.
    """

    def __init__(self, copies: PeerCopies, eviction: PeerEviction, leases: Borrowing):
        self.copies, self.eviction, self.leases = copies, eviction, leases

    @classmethod
    def from_env(
        cls, sessions: Any, numbers: Iterator[int], host: HostEviction
    ) -> "PeerTier | None":
        """Returns None if the engine does not borrow, or cannot, which is logged."""
        role, _, path = os.environ.get(LEASES_ENV, "").partition(":")
        if role != BORROW:
            return None
        cache = sessions.cache
        kv = cache.token_to_kv_pool_allocator.get_kvcache()
        geometry = geometry_of(kv, cache.page_size)
        reason = refusal(geometry) or unsupported_ranks()
        if reason is None and not is_supported(host.copies.pool):
            reason = f"layout: the host's pool is {host.copies.pool.layout}, not layer_first"
        if reason is not None:
            logger.error("borrows_nothing reason=%s", reason)
            host.counts[f"borrowing_refused_{reason.partition(':')[0]}"] = 1.0
            return None
        copies = PeerCopies(cache, numbers)
        eviction = PeerEviction(sessions, copies, host)
        member = member_of(f"{os.environ.get(STAGE_ENV)}-{os.getpid()}", path)
        leases = Borrowing(copies, eviction, geometry, kv, member)
        return cls(copies, eviction, leases)

    def reset(self) -> None:
        """To be called when SGLang has emptied its pools: leases stay."""
        self.copies.reset()
        self.eviction.reset()

    def step(self) -> None:
        """To be called once a round."""
        self.leases.step()
        self.eviction.move_if_short()

    def report(self) -> dict[str, float]:
        return {**self.copies.report(), **self.eviction.counts, **self.leases.report()}
