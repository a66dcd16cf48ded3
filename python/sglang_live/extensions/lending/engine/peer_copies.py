"""Copies of sessions' KV in pages that other engines lend.

Owner: one PeerCopies per session cache that borrows.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheAck, device_module
from sglang.srt.mem_cache.l2_transfer import L2Transfer
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.bridge.tiers.session_copies import SessionCopies, SessionCopy
from sglang_live.extensions.lending.engine.peer_pool import MoveToHost, PeerPool, PeerPools
from sglang_live.extensions.lending.slots import PeerSlots, Slots


class PeerCopies(SessionCopies):
    """
    Attributes:
        slots: of all leases.
    """

    def __init__(self, cache: UnifiedRadixCache, numbers: Iterator[int]):
        self.slots = PeerSlots()
        self._pools = PeerPools(cache.cache_controller)
        super().__init__(cache, numbers, ("tokens_moved",))

    def reset(self) -> None:
        super().reset()
        device_module.synchronize()  # SGLang has waited for its own transfers only
        self.slots.free_all()

    # --- lenders ---

    def add_lender(self, pool: PeerPool) -> int:
        """Returns the lender's first slot number."""
        return self._pools.add(pool)

    def remove_lender(self, base: int) -> None:
        """To be called when no slot of the lender is used; its memory is unmapped."""
        self._pools.remove(base)

    @property
    def n_lenders(self) -> int:
        return len(self._pools)

    def sessions_in(self, lease: object) -> list[str]:
        """Sessions whose copies have a slot in the lease."""
        return [
            session_id
            for session_id, copy in self._copies.items()
            if self.slots.touches(lease, copy.slots.numpy())
        ]

    # --- memory ---

    def take_slots(self, session_id: str, n: int) -> torch.Tensor | None:
        taken: Slots | None = self.slots.take(max(0, n))
        return None if taken is None else torch.from_numpy(taken)

    def free_slots(self, slots: torch.Tensor) -> None:
        self.slots.free(slots.numpy())

    # --- to the host ---

    def move(self, session_id: str, host: HostCopies) -> bool:
        """Begin to copy a session's tokens to the host, where its copy is from now on.

        Returns False, unchanged, if the host is full.
        """
        copy = self._copies[session_id]
        slots = host.take_slots(session_id, len(copy.slots))
        if slots is None:
            return False
        transfer, controller = self.new_number(), self._controller
        began_s = time.monotonic()
        completion = controller.l2_transfer_engine.submit_device_to_host(
            [L2Transfer(MoveToHost(self._pools, host.pool), None, slots, copy.slots)]
        )
        ack = HiCacheAck(
            start_event=completion.start_event,
            finish_event=completion.finish_event,
            node_ids=[transfer],
            num_tokens=len(slots),
            timing_enabled=completion.timing_enabled,
            num_tokens_by_pool={},
            num_bytes=len(slots) * self.bytes_per_token,
        )
        controller.ack_write_queue.append(ack)
        if not ack.timing_enabled:  # a transfer without events is synchronous
            host.to_tier.finished(ack.num_bytes, time.monotonic() - began_s)
        host.adopt(session_id, SessionCopy(copy.begin, copy.end, slots), transfer, ack)
        copy.busy.add(transfer)
        self._writes[transfer] = copy
        self.counts["tokens_moved"] += copy.end - copy.begin
        self.forget(session_id)
        return True

    def report(self) -> dict[str, float]:
        free, total = self.slots.n_free, self.slots.n_open
        return {
            **{f"peer_{name}": value for name, value in self.counts.items()},
            "peer_tokens": float(self.tokens),
            "peer_slots_free": float(free),
            "peer_slots": float(total),
            "peer_lenders": float(self.n_lenders),
        }


def is_supported(host_pool: Any) -> bool:
    """Whether copies can move to this pool in host memory."""
    return bool(host_pool.layout == "layer_first")
