"""Idle sessions on the host: when their KV is copied there, and how it comes back.

Out: in the background while memory is short, or at once when a session gives way before its turn
came. Back: with the prefill of the next request, layer by layer, or ahead of it (preloads.py).
What the host is short of goes on to storage, if there is some, and comes back to the host when its
caller speaks.
Owner: one SessionTier per session cache, if the engine has a HiCache.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchResult
from sglang.srt.session.streaming_session import SessionSlot
from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.kv_record import LiveKvInfo, Place
from sglang_live.bridge.tiers.host_copies import HostCopies, HostCopy, wait_for
from sglang_live.bridge.tiers.host_eviction import HostEviction
from sglang_live.bridge.tiers.storage import StoredTails
from sglang_live.kv.page_file import PageFile
from sglang_live.kv.retention import Compaction

# Background copies begin when less of the device's KV is free or idle prompts. Half: whoever is
# evicted an instant later has been copied by then, and calls that fit are not copied for nothing.
WRITE_BACK_BELOW = 0.5
# Of SGLang's request rows; preloads leave as many to those who come.
_SPARE_ROWS = 4
# In one round; the copies themselves run beside it, but each costs a launch.
_MAX_WRITES_PER_ROUND = 4


class SessionTier:
    """
    Args:
        sessions: the LiveSession whose slots these are.
        open_storage: makes the file for what the host is short of, given a page's size in bytes;
            None: there is none.
    """

    def __init__(self, sessions, open_storage: Callable[[int], PageFile] | None = None):
        self._sessions = sessions
        self.copies = HostCopies(sessions.inner)
        self.stored: StoredTails | None = None
        if open_storage is not None:
            file = open_storage(self.copies.bytes_per_token * self._page_size)
            self.stored = StoredTails(self.copies, file, self._least_of_all_ranks)
        self._room = HostEviction(sessions, self.copies, self.stored)
        self._to_copy: dict[str, None] = {}  # idle sessions with KV that is on the device alone
        self._arriving: dict[str, object] = {}  # finish events of preloads nobody has waited for
        self.counts = dict.fromkeys(
            ("tokens_lost", "evictions_waited", "loads", "loads_refused", "preloads"), 0.0
        )

    def _least_of_all_ranks(self, numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._sessions.inner._all_reduce(tensor, torch.distributed.ReduceOp.MIN)
        return tensor.tolist()

    def reset(self) -> None:
        if self.stored is not None:
            self.stored.reset()
        self.copies.reset()
        self._room.reset()
        self._to_copy.clear()
        self._arriving.clear()

    # --- out ---

    def is_idle(self, session_id: str) -> None:
        self._to_copy.pop(session_id, None)
        self._to_copy[session_id] = None

    def write_back(self) -> None:
        """Once a round."""
        self._room.store_some()
        if not self._to_copy or self._free_share() >= WRITE_BACK_BELOW:
            return
        for session_id in list(self._to_copy)[:_MAX_WRITES_PER_ROUND]:
            del self._to_copy[session_id]
            slot = self._sessions.slots.get(session_id)
            if slot is None or not slot.kv.holds_kv or _is_pinned(slot):
                continue  # it is put here again when it is idle again
            self._write(session_id, slot.kv)

    def _write(self, session_id: str, kv: LiveKvInfo) -> bool:
        is_written = self.copies.write(session_id, kv)
        self._room.used(session_id)
        return is_written

    def save(self, session_id: str, slot: SessionSlot, n_kept: int) -> None:
        """Before the session gives back its device slots behind n_kept."""
        self._to_copy.pop(session_id, None)
        self._wait_for_arrival(session_id)
        if not self._write(session_id, slot.kv):
            n_safe = self.end_of(session_id, n_kept)
            self.counts["tokens_lost"] += max(0, slot.kv.kv_committed_len - n_safe)
        self._wait_for_write(session_id)

    def _wait_for_write(self, session_id: str) -> None:
        copy = self.copies.of(session_id)
        if copy is not None and copy.written is not None:
            self.counts["evictions_waited"] += 1
            wait_for(copy.written)

    def is_changing(self, session_id: str) -> None:
        """Before device slots of the session are freed, or written other than at its end."""
        self._wait_for_arrival(session_id)
        copy = self.copies.of(session_id)
        if copy is not None and copy.written is not None:
            wait_for(copy.written)

    def truncate(self, session_id: str, n_tokens: int) -> None:
        """The session is about to end there."""
        self.is_changing(session_id)
        self.copies.truncate(session_id, n_tokens)
        if self.stored is not None:
            self.stored.truncated(session_id, n_tokens)
        self._room.changed(session_id)

    def cut(self, session_id: str, cut: Compaction) -> None:
        """The session is about to lose these whole pages."""
        self.is_changing(session_id)
        self.copies.cut(session_id, cut)
        if self.stored is not None:
            self.stored.cut(session_id, cut)
        self._room.changed(session_id)

    def discard(self, session_id: str) -> None:
        """The session's KV is about to be other than it was."""
        self.is_changing(session_id)
        self.copies.forget(session_id)
        self._room.changed(session_id)

    def forget(self, session_id: str) -> None:
        """It is closed."""
        self.discard(session_id)
        self._to_copy.pop(session_id, None)

    # --- back ---

    def expect(self, session_id: str) -> None:
        """When its caller will speak is known better now."""
        self._room.changed(session_id)

    def fetch(self, session_id: str) -> None:
        """Its caller speaks, or its request is there: what is in storage is to be on the host."""
        if self.stored is not None:
            self.stored.fetch(session_id, self._sessions.idle.now_s)
            self._room.changed(session_id)

    @property
    def fetches_any(self) -> bool:
        return self.stored is not None and self.stored.n_fetching > 0

    def is_fetching(self, session_id: str) -> bool:
        """And a request should wait for it."""
        return self.stored.is_fetching(session_id, self._sessions.idle.now_s)

    def settle(self) -> list[str]:
        """Once a round. Returns: sessions of which more is on the host now, perhaps."""
        changed = [] if self.stored is None else self.stored.settle()
        for session_id in changed:
            self._room.changed(session_id)
        return changed

    def with_host_hit(self, session_id: str, result: MatchResult, n_key: int) -> MatchResult:
        """A match on the device, with what the host has behind it. n_key: tokens of the request."""
        self._wait_for_arrival(session_id)
        n_device = len(result.device_indices)
        copy = self._behind(session_id, n_device)
        if copy is None or min(copy.end, n_key) <= n_device:
            return result
        return result._replace(host_hit_length=min(copy.end, n_key) - n_device)

    def _behind(self, session_id: str, n_device: int) -> HostCopy | None:
        copy = self.copies.of(session_id)
        if copy is None or not copy.begin <= n_device < copy.end:
            return None
        # What gives way gives whole pages; a session that ends within one has all of it there.
        return copy if n_device % self._page_size == 0 else None

    def end_of(self, session_id: str, n_device: int) -> int:
        """Where KV ends that is somewhere, for a session with so much on the device."""
        copy = self.copies.of(session_id)
        if copy is None or n_device < copy.begin or n_device % self._page_size:
            return n_device
        stored_end = None if self.stored is None else self.stored.end_of(session_id)
        return max(n_device, stored_end or copy.end)

    def load_back(self, req: Req) -> tuple[torch.Tensor, object]:
        """All that with_host_hit() promised, or nothing. Returns: its device slots, the node."""
        sessions, session_id = self._sessions, req.session.session_id
        slot = sessions.slots[session_id]
        # SGLang is about to take what it gets here for the tree's own.
        slot.virtual_node.own_from = slot.kv.cache_protected_len
        begin, end = len(req.prefix_indices), len(req.prefix_indices) + req.host_hit_length
        device = None
        copy = self._behind(session_id, begin)
        if copy is not None and end <= copy.end and self._has_row(slot):
            with self.keeping(session_id):
                self._make_room(ceil_align(end - begin, self._page_size))
            device = self.copies.load(copy, begin, end)
        if device is None:
            self.counts["loads_refused"] += 1
            self._drop_empty_row(slot)
            return torch.empty(0, dtype=torch.int64, device=sessions.inner.device), req.last_node
        self.counts["loads"] += 1
        self._attach(slot, begin, end, device)
        return device[: end - begin], req.last_node

    def keeping(self, session_id: str) -> AbstractContextManager[None]:
        """What is on the host stays there, whatever happens meanwhile."""
        return self._room.keeping(session_id)

    def tokens_to_preload(self, session_id: str) -> int:
        """Whole pages that are on the host alone; 0 if the session is not idle."""
        slot = self._sessions.slots.get(session_id)
        if slot is None or not isinstance(slot.virtual_node, Place) or _is_pinned(slot):
            return 0
        begin = slot.kv.kv_committed_len
        copy = self._behind(session_id, begin)
        return 0 if copy is None else ceil_align(copy.end - begin, self._page_size)

    def has_row_to_spare(self, session_id: str) -> bool:
        """Without any row SGLang admits nobody, and nobody gives one back for that."""
        slot = self._sessions.slots[session_id]
        return slot.kv.holds_kv or self._sessions.req_to_token_pool.available_size() > _SPARE_ROWS

    def preload(self, session_id: str) -> bool:
        """Bring back what is on the host alone. False: there is no memory for it.

        Nobody waits for it before its request comes.
        """
        n_slots = self.tokens_to_preload(session_id)
        slot = self._sessions.slots.get(session_id)
        if n_slots == 0 or not self.has_row_to_spare(session_id) or not self._has_row(slot):
            return False
        device = self._sessions.token_to_kv_pool_allocator.alloc(n_slots)
        if device is None:
            self._drop_empty_row(slot)
            return False
        begin, copy = slot.kv.kv_committed_len, self.copies.of(session_id)
        self._arriving[session_id] = self.copies.preload(copy, begin, copy.end, device)
        self._attach(slot, begin, copy.end, device)
        self.counts["preloads"] += 1
        return True

    def _attach(self, slot: SessionSlot, begin: int, end: int, device: torch.Tensor) -> None:
        row = self._sessions.req_to_token_pool.req_to_token[slot.kv.req_pool_idx]
        assert begin == ceil_align(slot.kv.kv_allocated_len, self._page_size)
        row[begin : begin + len(device)] = device.to(row.dtype)
        slot.kv.kv_allocated_len = slot.kv.kv_committed_len = end

    def _has_row(self, slot: SessionSlot) -> bool:
        """A session that gave everything back gave its row as well."""
        if slot.kv.holds_kv:
            return True
        rows = self._sessions.req_to_token_pool.alloc_rows(1)
        if rows is None:
            return False
        slot.kv.req_pool_idx = rows[0]
        row = self._sessions.req_to_token_pool.req_to_token[rows[0]]
        row[: len(slot.kv.parked)] = slot.kv.parked.to(row.dtype)
        return True

    def _drop_empty_row(self, slot: SessionSlot) -> None:
        if slot.kv.holds_kv and slot.kv.kv_allocated_len == slot.kv.cache_protected_len:
            self._sessions.park(slot)

    def _make_room(self, n_slots: int) -> None:
        missing = n_slots - self._sessions.token_to_kv_pool_allocator.available_size()
        if missing > 0:
            self._sessions.inner.evict_for_alloc(EvictParams(num_tokens=missing))

    def _wait_for_arrival(self, session_id: str) -> None:
        event = self._arriving.pop(session_id, None)
        if event is not None:
            wait_for(event)

    # --- for reports ---

    def report(self) -> dict[str, float]:
        return {
            **self.counts,
            **self.copies.counts,
            **self._room.counts,
            "tokens_on_host": float(self.copies.tokens),
            **(self.stored.report() if self.stored is not None else {}),
        }

    def _free_share(self) -> float:
        inner = self._sessions.inner
        allocator = inner.token_to_kv_pool_allocator
        return (allocator.available_size() + inner.tree_evictable_size()) / allocator.size

    @property
    def _page_size(self) -> int:
        return self._sessions.page_size


def _is_pinned(slot: SessionSlot) -> bool:
    return not isinstance(slot.virtual_node, Place) or slot.virtual_node.n_pins > 0
