"""KV of idle sessions below the device: when it is copied there, and where it is found.

Down: in the background while device memory is short, or at once when a session is evicted before
that; to a nearer tier, if an extension has added one, otherwise to the host. A session has its copy
on one of the two. Back: session_loads.py. With storage, the tails of host copies move there
when the host's memory is short, and are fetched when the user speaks.
Owner: one SessionTier per session cache, if the engine has a HiCache.
"""

from collections import OrderedDict
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheAck
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.session.streaming_session import SessionSlot

from sglang_live.bridge.round_facts import LinkRate
from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.session.kv_record import LiveKvInfo, n_on_device
from sglang_live.bridge.tiers.host_copies import HostCopies, transfer_numbers
from sglang_live.bridge.tiers.host_eviction import HostEviction
from sglang_live.bridge.tiers.nearer import NearerTier
from sglang_live.bridge.tiers.no_tier import NoTier
from sglang_live.bridge.tiers.session_loads import SessionLoads, is_pinned
from sglang_live.bridge.tiers.storage import storage_from_env
from sglang_live.bridge.tiers.tier_copies import TierCopies
from sglang_live.kv.retention import Compaction

# Share of the device's KV that is free or in unlocked leaves, below which background copies begin.
# Half: sessions are copied before they are evicted, and an engine with ample memory copies none.
WRITE_BACK_BELOW = 0.5
# Copies run concurrently with the round, but each costs a launch in it.
_MAX_WRITES_PER_ROUND = 4


class SessionTier(NoTier):
    """
    Args:
        sessions: the SessionCache whose slots these are.

    Attributes:
        copies: on the host.
        all: on all tiers.
        loads: back to the device.
        numbers: of transfers.
        eviction: of copies on the host.
        nearer: a tier between the device and the host.
    """

    def __init__(self, sessions: Any):
        self._sessions = sessions
        self.numbers = transfer_numbers()
        self.copies = HostCopies(sessions.cache, self.numbers)
        self.stored = storage_from_env(self.copies, self._least_of_all_ranks)
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
    def is_draining(self) -> bool:
        return self.nearer.is_draining

    @property
    def copies_any(self) -> bool:
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
        self._to_copy.pop(session_id, None)
        self.loads.wait(session_id)
        if not self._write(session_id, slot.kv):
            n_safe = self.end_of(session_id, n_kept)
            self.counts["tokens_lost"] += max(0, slot.kv.kv_committed_len - n_safe)
        self._wait_for_write(session_id)

    def _wait_for_write(self, session_id: str) -> None:
        for _, copy in self.all.of(session_id):
            self.counts["evictions_waited"] += copy.wait_until_written()

    def before_device_change(self, session_id: str) -> None:
        """To be called before device slots of the session are freed, or written before its end."""
        self.loads.wait(session_id)
        for _, copy in self.all.of(session_id):
            copy.wait_until_written()

    def truncate(self, session_id: str, n_tokens: int) -> None:
        self.before_device_change(session_id)
        for tier, _ in self.all.of(session_id):
            tier.truncate(session_id, n_tokens)
        self.stored.truncated(session_id, n_tokens)
        self._changed(session_id)

    def compact(self, session_id: str, compaction: Compaction) -> None:
        self.before_device_change(session_id)
        for tier, _ in self.all.of(session_id):
            tier.compact(session_id, compaction)
        self.stored.compact(session_id, compaction)
        self._changed(session_id)

    def discard(self, session_id: str) -> None:
        self.before_device_change(session_id)
        for tier, _ in self.all.of(session_id):
            tier.forget(session_id)
        self._changed(session_id)

    def forget(self, session_id: str) -> None:
        self.discard(session_id)
        self._to_copy.pop(session_id, None)

    # --- back ---

    def with_host_hit(self, session_id: str, result: MatchResult, n_key: int) -> MatchResult:
        return self.loads.with_host_hit(session_id, result, n_key)

    def load_back(self, req: Req) -> tuple[int, object]:
        return self.loads.load_back(req)

    # --- what is expected, and where it is ---

    def expect(self, session_id: str) -> None:
        self._changed(session_id)

    def fetch(self, session_id: str) -> None:
        if self.stored.fetch(session_id, self._idle.now_s):
            self.eviction.changed(session_id)

    @property
    def fetches_any(self) -> bool:
        return self.stored.n_fetching > 0

    def is_fetching(self, session_id: str) -> bool:
        return self.stored.is_fetching(session_id, self._idle.now_s)

    def settle(self) -> list[str]:
        changed = self.stored.settle()
        for session_id in changed:
            self.eviction.changed(session_id)
        return changed

    def is_nearer(self, session_id: str) -> bool:
        """Whether a load of the session would come from a nearer tier than the host."""
        if not self.all.nearer:
            return False
        begin = n_on_device(self._sessions.slots, session_id)
        return self.all.is_nearer(self.all.behind(session_id, begin))

    def end_of(self, session_id: str, n_device: int) -> int:
        if n_device % self._page_size:
            return n_device
        ends = [n_device]
        for tier, copy in self.all.of(session_id):
            if n_device >= copy.begin:
                is_host = tier is self.copies
                ends.append(self.stored.end_of(session_id, copy.end) if is_host else copy.end)
        return max(ends)

    # --- SGLang acknowledges ---

    def stamp(self, rates: tuple[LinkRate, LinkRate]) -> None:
        self.all.rates = rates

    def measured(self) -> tuple[LinkRate, ...]:
        return self.copies.rate(), self.all.nearer_rate()

    def acknowledged(self, transfer: int) -> bool:
        return self.all.acknowledged(transfer)

    def measure_write(self, ack: HiCacheAck) -> None:
        self.all.measure_write(ack)

    def all_written(self) -> None:
        self.all.all_written()

    def take_loads(self, finish_count: int | None) -> None:
        cache = self._sessions.cache
        queue = cache.cache_controller.ack_load_queue
        n = cache._count_ready_acks(queue) if finish_count is None else finish_count
        for ack in queue[:n]:
            ack.finish_event.synchronize()
            self.all.measure_load(ack)
            # SGLang looks up every remaining id among the tree's nodes.
            ack.node_ids[:] = [i for i in ack.node_ids if not self.all.acknowledged(i)]

    # --- reports ---

    def report(self) -> dict[str, float]:
        return {
            **self.counts,
            **self.loads.counts,
            **self.copies.counts,
            **self.eviction.counts,
            "tokens_on_host": float(self.copies.tokens),
            **self.nearer.report(),
            **self.stored.report(),
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
