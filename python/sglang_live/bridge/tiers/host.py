"""KV of idle sessions below the device: when it is copied there, and where it is found.

Down: in the background while device memory is short, or at once when a session is evicted before
that; to a nearer tier, if an extension has added one, otherwise to the host. A session has its copy
on one of the two. Back: session_loads.py. With storage, the tails of host copies move there
when the host's memory is short, and are fetched when the user speaks.
Owner: one SessionTier per session cache, if the engine has a HiCache.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.session.streaming_session import SessionSlot

from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.session.kv_record import LiveKvInfo
from sglang_live.bridge.tiers.host_copies import HostCopies, transfer_numbers
from sglang_live.bridge.tiers.host_eviction import HostEviction
from sglang_live.bridge.tiers.nearer import NearerTier
from sglang_live.bridge.tiers.session_copies import wait_for
from sglang_live.bridge.tiers.session_loads import SessionLoads, is_pinned
from sglang_live.bridge.tiers.storage import StoredTails
from sglang_live.bridge.tiers.tier_copies import TierCopies
from sglang_live.kv.page_file import PageFile
from sglang_live.kv.retention import Compaction

# Share of the device's KV that is free or in unlocked leaves, below which background copies begin.
# Half: sessions are copied before they are evicted, and an engine with ample memory copies none.
WRITE_BACK_BELOW = 0.5
# Copies run concurrently with the round, but each costs a launch in it.
_MAX_WRITES_PER_ROUND = 4


class SessionTier:
    """
    Args:
        sessions: the SessionCache whose slots these are.
        open_storage: opens the storage tier's file, given a page's size in bytes; None: there is
            no storage tier.

    Attributes:
        copies: on the host.
        all: on all tiers.
        loads: back to the device.
        numbers: of transfers.
        eviction: of copies on the host.
        nearer: a tier between the device and the host.
    """

    def __init__(self, sessions: Any, open_storage: Callable[[int], PageFile] | None = None):
        self._sessions = sessions
        self.numbers = transfer_numbers()
        self.copies = HostCopies(sessions.cache, self.numbers)
        self.stored: StoredTails | None = None
        if open_storage is not None:
            file = open_storage(self.copies.bytes_per_token * self._page_size)
            self.stored = StoredTails(self.copies, file, self._least_of_all_ranks)
        self.eviction = HostEviction(sessions, self.copies, self.stored)
        self.nearer = NearerTier()
        self.all = TierCopies(self.copies)
        # Idle sessions with KV that is on the device alone.
        self._to_copy: OrderedDict[str, None] = OrderedDict()
        self.loads = SessionLoads(sessions, self.all, self.eviction.keeping)
        self.counts = dict.fromkeys(("tokens_lost", "evictions_waited"), 0.0)

    def put_nearer(self, tier: NearerTier) -> None:
        """Add a tier between the device and the host. To be called before the first session."""
        self.nearer = tier
        self.all.nearer = tier.copies

    def _least_of_all_ranks(self, numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._sessions.cache._all_reduce(tensor, torch.distributed.ReduceOp.MIN)
        return [int(number) for number in tensor.tolist()]

    def reset(self) -> None:
        if self.stored is not None:
            self.stored.reset()
        self.copies.reset()
        self.eviction.reset()
        self.nearer.reset()
        self._to_copy.clear()
        self.loads.reset()

    # --- down ---

    def set_idle(self, session_id: str) -> None:
        self._to_copy[session_id] = None
        self._to_copy.move_to_end(session_id)

    def write_back(self) -> None:
        """To be called once a round."""
        self.eviction.store_if_short()
        self.nearer.step()
        if not self.copies_any:
            return
        for _ in range(min(len(self._to_copy), _MAX_WRITES_PER_ROUND)):
            session_id, _ = self._to_copy.popitem(last=False)
            slot = self._sessions.slots.get(session_id)
            if slot is None or not slot.kv.holds_kv or is_pinned(slot):
                continue  # set_idle() adds it again
            self._write(session_id, slot.kv)

    @property
    def copies_any(self) -> bool:
        """Whether copies are to be made ahead of evictions, some in each round."""
        return bool(self._to_copy) and self._free_share() < WRITE_BACK_BELOW

    def _write(self, session_id: str, kv: LiveKvInfo) -> bool:
        """Copy what has no copy yet, to the nearest tier that has room. A copy on another one is
        replaced as a whole: while it has to grow, the device has all of the session.
        """
        if any(
            copy.begin <= kv.cache_protected_len and copy.end >= kv.kv_committed_len
            for _, copy in self.all.of(session_id)
        ):
            is_written = True
        else:
            is_written = self._write_new(session_id, kv)
        self._used(session_id)
        return is_written

    def _write_new(self, session_id: str, kv: LiveKvInfo) -> bool:
        for tier in self.all.tiers:
            if tier.write(session_id, kv):
                for other in self.all.tiers:
                    if other is not tier:
                        other.forget(session_id)
                return True
        return False

    def _used(self, session_id: str) -> None:
        self.eviction.used(session_id)
        self.nearer.used(session_id)

    def _changed(self, session_id: str) -> None:
        self.eviction.changed(session_id)
        self.nearer.changed(session_id)

    def save(self, session_id: str, slot: SessionSlot, n_kept: int) -> None:
        """To be called before the session's device slots behind n_kept are evicted."""
        self._to_copy.pop(session_id, None)
        self.loads.wait(session_id)
        if not self._write(session_id, slot.kv):
            n_safe = self.end_of(session_id, n_kept)
            self.counts["tokens_lost"] += max(0, slot.kv.kv_committed_len - n_safe)
        self._wait_for_write(session_id)

    def _wait_for_write(self, session_id: str) -> None:
        for _, copy in self.all.of(session_id):
            if copy.written is not None:
                self.counts["evictions_waited"] += 1
                wait_for(copy.written)

    def before_device_change(self, session_id: str) -> None:
        """To be called before device slots of the session are freed, or written before its end."""
        self.loads.wait(session_id)
        for _, copy in self.all.of(session_id):
            if copy.written is not None:
                wait_for(copy.written)

    def truncate(self, session_id: str, n_tokens: int) -> None:
        """To be called before the session is truncated to n_tokens."""
        self.before_device_change(session_id)
        for tier, _ in self.all.of(session_id):
            tier.truncate(session_id, n_tokens)
        if self.stored is not None:
            self.stored.truncated(session_id, n_tokens)
        self._changed(session_id)

    def compact(self, session_id: str, compaction: Compaction) -> None:
        """To be called before the session loses these whole pages."""
        self.before_device_change(session_id)
        for tier, _ in self.all.of(session_id):
            tier.compact(session_id, compaction)
        if self.stored is not None:
            self.stored.compact(session_id, compaction)
        self._changed(session_id)

    def discard(self, session_id: str) -> None:
        """To be called before the session's KV changes in place: its copies are dropped."""
        self.before_device_change(session_id)
        for tier, _ in self.all.of(session_id):
            tier.forget(session_id)
        self._changed(session_id)

    def forget(self, session_id: str) -> None:
        """Remove all data of a closed session."""
        self.discard(session_id)
        self._to_copy.pop(session_id, None)

    # --- what is expected, and where it is ---

    def expect(self, session_id: str) -> None:
        """To be called when the session's expected next use has changed."""
        self._changed(session_id)

    def fetch(self, session_id: str) -> None:
        """Begin to read the session's stored tail to the host: its user speaks, or its request
        has come.
        """
        if self.stored is not None:
            self.stored.fetch(session_id, self._idle.now_s)
            self.eviction.changed(session_id)

    @property
    def fetches_any(self) -> bool:
        return self.stored is not None and self.stored.n_fetching > 0

    def is_fetching(self, session_id: str) -> bool:
        """Whether a request of the session should wait for its stored tail."""
        return self.stored is not None and self.stored.is_fetching(session_id, self._idle.now_s)

    def settle(self) -> list[str]:
        """To be called once a round. Returns the sessions whose host copies may have grown."""
        changed = [] if self.stored is None else self.stored.settle()
        for session_id in changed:
            self.eviction.changed(session_id)
        return changed

    def is_nearer(self, session_id: str) -> bool:
        """Whether a load of the session would come from a nearer tier than the host."""
        slot = self._sessions.slots.get(session_id)
        if not self.all.nearer or slot is None:
            return False
        return self.all.is_nearer(self.all.behind(session_id, slot.kv.kv_committed_len))

    def end_of(self, session_id: str, n_device: int) -> int:
        """The end of the session's KV on all tiers, given its end on the device."""
        if n_device % self._page_size:
            return n_device
        ends = [n_device]
        for tier, copy in self.all.of(session_id):
            if n_device >= copy.begin:
                stored = self.stored if tier is self.copies else None
                stored_end = None if stored is None else stored.end_of(session_id)
                ends.append(stored_end or copy.end)
        return max(ends)

    # --- reports ---

    def report(self) -> dict[str, float]:
        return {
            **self.counts,
            **self.loads.counts,
            **self.copies.counts,
            **self.eviction.counts,
            "tokens_on_host": float(self.copies.tokens),
            **self.nearer.report(),
            **(self.stored.report() if self.stored is not None else {}),
        }

    def _free_share(self) -> float:
        cache = self._sessions.cache
        allocator = cache.token_to_kv_pool_allocator
        n_free: int = allocator.available_size() + cache.tree_evictable_size()
        return float(n_free / allocator.size)

    @property
    def _idle(self) -> IdleSessions:
        idle: IdleSessions = self._sessions.idle
        return idle

    @property
    def _page_size(self) -> int:
        page_size: int = self._sessions.cache.page_size
        return page_size
