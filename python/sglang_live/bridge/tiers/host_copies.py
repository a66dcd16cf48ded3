"""Copies of sessions' KV in host memory: SGLang's host pool.

Owner: one HostCopies per session cache.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheAck
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_live.bridge.session.kv_record import LiveKvInfo
from sglang_live.bridge.tiers.session_copies import SessionCopies, SessionCopy


def transfer_numbers() -> Iterator[int]:
    """SGLang's own transfers have the numbers of tree nodes, from 0."""
    return itertools.count(-1000, -1)


class HostCopies(SessionCopies):
    def __init__(self, cache: UnifiedRadixCache, numbers: Iterator[int] | None = None):
        # Called with (session_id, n_slots) to free host slots of other sessions for this one.
        self.make_room: Callable[[str, int], None] = lambda session_id, n_slots: None
        super().__init__(cache, numbers or transfer_numbers(), ("writes_host_full",))

    @property
    def pool(self) -> Any:
        """SGLang's pool of KV in host memory."""
        return self._controller.mem_pool_host.anchor_entry.host_pool

    @property
    def n_free_slots(self) -> int:
        n_slots: int = self._cache.host_pool_group.available_size()
        return n_slots

    @property
    def bytes_to_device(self) -> int:
        """Bytes of all loads that have not ended, SGLang's own included; equal on all ranks."""
        controller = self._controller
        started: int = sum(ack.num_bytes for ack in controller.ack_load_queue)
        queued: int = sum(len(operation.device_indices) for operation in controller.load_queue)
        return started + queued * self.bytes_per_token

    def write(self, session_id: str, kv: LiveKvInfo) -> bool:
        is_written = super().write(session_id, kv)
        self.counts["writes_host_full"] += not is_written
        return is_written

    def adopt(self, session_id: str, copy: SessionCopy, transfer: int, ack: HiCacheAck) -> None:
        """Add a copy that another tier writes, in the place of the session's own."""
        self.forget(session_id)
        copy.busy.add(transfer)
        copy.written = ack.finish_event
        self._writes[transfer] = self._copies[session_id] = copy

    def take_slots(self, session_id: str, n: int) -> torch.Tensor | None:
        if n <= 0:
            return torch.empty(0, dtype=torch.int64)
        pool = self._cache.host_pool_group
        if (missing := n - pool.available_size()) > 0:
            self._cache.evict_host(missing)
        if (missing := n - pool.available_size()) > 0:
            self.make_room(session_id, missing)
        return pool.alloc(n)

    def free_slots(self, slots: torch.Tensor) -> None:
        if len(slots):
            self._cache.host_pool_group.free(slots)
