"""How KV of idle sessions is loaded back to the device.

With the prefill of the next request, layer by layer, or before it: as a preload (preload.py), or
for a request that awaits it (awaited_kv.py).
Owner: one SessionLoads per SessionTier.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchResult
from sglang.srt.session.streaming_session import SessionSlot
from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.session.kv_record import SessionNode
from sglang_live.bridge.tiers.session_copies import wait_for
from sglang_live.bridge.tiers.tier_copies import TierCopies

# SGLang's request rows that preloads leave to new requests.
_SPARE_ROWS = 4


class SessionLoads:
    """
    Args:
        sessions: the SessionCache whose slots these are.
        copies: on all tiers.
        keeping: a context in which a session's copy is not evicted.
    """

    def __init__(
        self,
        sessions: Any,
        copies: TierCopies,
        keeping: Callable[[str], AbstractContextManager[None]],
    ):
        self._sessions = sessions
        self._copies = copies
        self.keeping = keeping
        # Finish events of preloads that were not waited for.
        self._arriving: dict[str, list[Any]] = {}
        self.counts = dict.fromkeys(("loads", "loads_refused", "preloads"), 0.0)

    def reset(self) -> None:
        self._arriving.clear()

    @property
    def n_layers(self) -> int:
        """Layers of the KV, which a load moves one after another."""
        n: int = self._sessions.cache.token_to_kv_pool_allocator.get_kvcache().layer_num
        return n

    def with_host_hit(self, session_id: str, result: MatchResult, n_key: int) -> MatchResult:
        """See NoTier."""
        self.wait(session_id)
        n_device = result.device_prefix_len
        _, copy = self._copies.behind(session_id, n_device)
        end = min(copy.end, n_key)
        return result if end <= n_device else result._replace(host_hit_length=end - n_device)

    def load_back(self, req: Req) -> tuple[int, object]:
        """See NoTier."""
        sessions, session_id = self._sessions, req.session.session_id
        slot = sessions.slots[session_id]
        # SGLang then sets cache_protected_len as if the loaded tokens were in the tree.
        slot.virtual_node.own_from = slot.kv.cache_protected_len
        begin, end = req.prefix_len, req.prefix_len + req.host_hit_length
        device = None
        tier, copy = self._copies.behind(session_id, begin)
        if end <= copy.end and self._has_row(slot):
            with self.keeping(session_id):
                self._make_room(ceil_align(end - begin, self._page_size))
            device = tier.load(copy, begin, end)
        if device is None:
            self.counts["loads_refused"] += 1
            self._drop_empty_row(slot)
            return 0, req.last_node
        self.counts["loads"] += 1
        self._attach(slot, begin, end, device)
        return end - begin, req.last_node

    def tokens_to_preload(self, session_id: str) -> int:
        """Tokens, in whole pages, that are on the host only; 0 if the session is not idle."""
        slot = self._sessions.slots.get(session_id)
        if slot is None or not isinstance(slot.virtual_node, SessionNode) or is_pinned(slot):
            return 0
        begin = slot.kv.kv_committed_len
        _, copy = self._copies.behind(session_id, begin)
        return ceil_align(copy.end - begin, self._page_size)

    def has_spare_row(self, session_id: str) -> bool:
        """Whether a preload may take a row: without free rows SGLang admits no request."""
        slot = self._sessions.slots[session_id]
        n_free: int = self._sessions.cache.req_to_token_pool.available_size()
        return bool(slot.kv.holds_kv) or n_free > _SPARE_ROWS

    def preload(self, session_id: str, most_tokens: int) -> int:
        """Begin to load the first most_tokens, whole pages, of what is on the host only.

        The session's next request waits for the transfer.

        Returns:
            How many tokens are loaded; 0 if there is no memory for them.
        """
        if not self.tokens_to_preload(session_id) or not self.has_spare_row(session_id):
            return 0
        return self._begin_load(session_id, most_tokens)

    def load_now(self, session_id: str, n_tokens: int) -> int:
        """As preload(), for a request that waits: with the last row, and evicting for it."""
        with self.keeping(session_id):
            self._make_room(n_tokens)
        return self._begin_load(session_id, n_tokens)

    def _begin_load(self, session_id: str, most_tokens: int) -> int:
        n_slots = min(self.tokens_to_preload(session_id), most_tokens)
        slot = self._sessions.slots[session_id]
        if not self._has_row(slot):
            return 0
        device = self._sessions.cache.token_to_kv_pool_allocator.alloc(n_slots)
        if device is None:
            self._drop_empty_row(slot)
            return 0
        begin = slot.kv.kv_committed_len
        tier, copy = self._copies.behind(session_id, begin)
        end = min(copy.end, begin + n_slots)
        arrival = tier.preload(copy, begin, end, device)
        self._arriving.setdefault(session_id, []).append(arrival)
        self._attach(slot, begin, end, device)
        return n_slots

    def _attach(self, slot: SessionSlot, begin: int, end: int, device: torch.Tensor) -> None:
        row = self._sessions.cache.req_to_token_pool.req_to_token[slot.kv.req_pool_idx]
        assert begin == ceil_align(slot.kv.kv_allocated_len, self._page_size)
        row[begin : begin + len(device)] = device.to(row.dtype)
        slot.kv.kv_allocated_len = slot.kv.kv_committed_len = end

    def _has_row(self, slot: SessionSlot) -> bool:
        """Allocate the row of a fully evicted session. Returns False if no row is free."""
        if slot.kv.holds_kv:
            return True
        rows = self._sessions.cache.req_to_token_pool.alloc_rows(1)
        if rows is None:
            return False
        slot.kv.req_pool_idx = rows[0]
        row = self._sessions.cache.req_to_token_pool.req_to_token[rows[0]]
        row[: len(slot.kv.parked)] = slot.kv.parked.to(row.dtype)
        return True

    def _drop_empty_row(self, slot: SessionSlot) -> None:
        if slot.kv.holds_kv and slot.kv.kv_allocated_len == slot.kv.cache_protected_len:
            self._sessions.park(slot)

    def _make_room(self, n_slots: int) -> None:
        missing = n_slots - self._sessions.cache.token_to_kv_pool_allocator.available_size()
        if missing > 0:
            self._sessions.cache.evict_for_alloc(EvictParams(num_tokens=missing))

    def wait(self, session_id: str) -> None:
        """Wait until the session's preloads have arrived."""
        for event in self._arriving.pop(session_id, ()):
            wait_for(event)

    @property
    def _page_size(self) -> int:
        page_size: int = self._sessions.cache.page_size
        return page_size


def is_pinned(slot: SessionSlot) -> bool:
    return not isinstance(slot.virtual_node, SessionNode) or slot.virtual_node.n_pins > 0
