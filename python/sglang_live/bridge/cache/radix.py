"""SGLang's radix cache with one order of eviction for the tree and for idle sessions.

In: unlocked leaves of the tree, and idle sessions. Out: free memory, first from the one whose next
use is expected last. Transfers of both to the host and back use SGLang's HiCache.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheAck
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    TreeLock,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_live.bridge.cache.session_cache import SessionCache
from sglang_live.bridge.session.compact import Rebase
from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.session.kv_record import SessionNode
from sglang_live.bridge.tiers.host import SessionTier
from sglang_live.bridge.tiers.preload import Preloads
from sglang_live.engine_channel.inbox import RADIX_BACKEND, policies_from_env
from sglang_live.kv.tree_age import TreeAge


class LiveRadixCache(UnifiedRadixCache):
    """A radix cache in which idle sessions are evictable, in one order with the tree's leaves."""

    session: SessionCache

    def __init__(self, params: CacheInitParams):
        self._age = TreeAge()
        self._spare_tokens = 0
        super().__init__(params)
        self.session = SessionCache(self)

    def _reset_full(self) -> None:
        super()._reset_full()
        self._age = TreeAge()
        self._spare_tokens = 0
        session = getattr(self, "session", None)  # absent when the base constructor calls this
        if not isinstance(session, SessionCache):
            return
        session.idle = IdleSessions(self.page_size)
        session.tier.reset()
        session.preloads = Preloads(session, is_on=session.preloads.is_on)

    # --- memory ---

    def tree_evictable_size(self) -> int:
        n_tokens: int = super().evictable_size()
        return n_tokens

    def evict_tree(self, n_tokens: int) -> int:
        """Evict unlocked leaves of the tree. Returns the tokens freed."""
        n_evicted: int = super().evict(EvictParams(num_tokens=n_tokens)).num_tokens_evicted
        return n_evicted

    def evictable_size(self) -> int:
        return self.tree_evictable_size() + self.session.idle.tokens

    def full_evictable_size(self) -> int:
        n_tokens: int = super().full_evictable_size()
        return n_tokens + self.session.idle.tokens

    def evict(self, params: EvictParams) -> EvictResult:
        if not self.session.evicts_idle:
            return super().evict(params)
        return self._evict_oldest(params, super().evict)

    def evict_for_alloc(
        self,
        params: EvictParams,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> EvictResult:
        # Only pools of several kinds of attention have the condition.
        assert allocation_reclaim_satisfied is None
        if not self.session.evicts_idle:
            return super().evict_for_alloc(params)
        return self._evict_oldest(params, super().evict_for_alloc)

    def insert(self, params: InsertParams) -> InsertResult:
        if self.session.evicts_idle:
            self._age.used(len(params.key), self.session.idle.now_s)
        result = super().insert(params)
        if params.priority is not None and params.priority < 0:
            self._spare_tokens += max(0, len(params.key) - result.prefix_len)
        return result

    def _evict_oldest(
        self, params: EvictParams, from_tree: Callable[[EvictParams], EvictResult]
    ) -> EvictResult:
        """Evict from tree and idle sessions in the order of the latest expected use.

        First what best effort has inserted into the tree, which evicts by priority. A leaf that has
        been unused for some time is expected to stay unused for as long again, like a session
        without a hint.
        """
        idle = self.session.idle
        result = EvictResult()
        missing = params.num_tokens

        def take_from_tree(n_tokens: int) -> int:
            freed = from_tree(EvictParams(num_tokens=n_tokens)).num_tokens_evicted
            result.num_tokens_evicted += freed
            self._spare_tokens = max(0, self._spare_tokens - freed)
            return freed

        if self._spare_tokens:
            missing -= take_from_tree(min(missing, self._spare_tokens))
        while missing > 0 and (session := idle.next_victim()) is not None:
            idle_since_s = idle.now_s - session.remaining_s
            n_older = self._age.unused_since(idle_since_s, self.tree_evictable_size())
            if n_older > 0:
                missing -= (freed := take_from_tree(min(missing, n_older)))
                if freed > 0:
                    continue
            freed = self.session.evict_idle(min(missing, session.n_tokens))
            result.num_tokens_evicted += freed
            missing -= freed
            assert freed > 0  # the loop ends
        if missing > 0:
            missing -= take_from_tree(missing)
        if missing > 0:
            result.num_tokens_evicted += self.session.evict_idle(missing)
        return result

    def session_records(self) -> dict[str, ReqKvInfo]:
        """Upstream's, but without the KV of idle sessions, which is counted as evictable."""
        records: dict[str, ReqKvInfo] = super().session_records()
        return {
            session_id: _row_alone(kv) if session_id in self.session.idle else kv
            for session_id, kv in records.items()
        }

    # --- sessions in the place of a tree node ---

    def lock(self, node_id: Any, skip_lock_components: Sequence[Any] = ()) -> TreeLock | None:
        if isinstance(node_id, SessionNode):
            return self.session.pin(node_id)
        return super().lock(node_id, skip_lock_components)

    def unlock(self, lock: TreeLock | None) -> None:
        if lock is not None and isinstance(lock.node, SessionNode):
            self.session.unpin(lock.node)
        else:
            super().unlock(lock)

    def inc_host_lock_ref(self, node_id: Any) -> IncLockRefResult:
        if isinstance(node_id, SessionNode):
            return IncLockRefResult()
        return super().inc_host_lock_ref(node_id)

    def dec_host_lock_ref(self, node_id: Any, params: DecLockRefParams) -> DecLockRefResult:
        if isinstance(node_id, SessionNode):
            return DecLockRefResult()
        return super().dec_host_lock_ref(node_id, params)

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        slot = self.session.borrowed_slot(req)
        # Only a session whose row was evicted has none.
        return super().prefix_device_indices(req) if slot is None else slot.kv.parked

    # --- the host ---

    def init_load_back(self, params: InitLoadBackParams) -> Any:
        if isinstance(params.best_match_node, SessionNode):
            return self.session.tier.load_back(params.req)
        return super().init_load_back(params)

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        self.session.update_tiers()

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        super().writing_check(write_back=write_back, finish_count=finish_count)
        if write_back:
            self.session.tier.all_written()

    def _finish_write_through_ack(self, ack_id: int) -> None:
        if not self.session.tier.acknowledged(ack_id):
            super()._finish_write_through_ack(ack_id)

    def _log_write_ack_metrics(self, ack: HiCacheAck) -> None:
        self.session.tier.measure_write(ack)
        super()._log_write_ack_metrics(ack)

    def loading_check(self, finish_count: int | None = None) -> None:
        self.session.tier.take_loads(finish_count)
        super().loading_check(finish_count)


def _row_alone(kv: ReqKvInfo) -> ReqKvInfo:
    without = copy.copy(kv)
    without.kv_allocated_len = without.kv_committed_len = kv.cache_protected_len
    return without


def live_radix_cache(ctx: TreeCacheBuildContext) -> UnifiedRadixCache:
    """Factory for SGLang's registry.

    Raises:
        ValueError: this model's sessions cannot be compacted.
    """
    if ctx.is_hybrid_swa or ctx.is_hybrid_ssm or ctx.disable_radix_cache:
        raise ValueError("bounded sessions need a radix cache and plain attention in every layer")
    policies = policies_from_env()
    if policies.tells_best_effort:
        # The tree's own order by priority, then by last use. SGLang's argument stays `lru`, by
        # which it touches what waiting requests will match.
        ctx.params.eviction_policy = "priority"
    cache = create_unified_radix_cache(ctx, cache_class=LiveRadixCache)
    if policies.next_use:
        cache.session.evicts_idle = True
        if ctx.enable_hierarchical_cache:
            cache.session.tier = SessionTier(cache.session)
            if policies.preload:
                cache.session.preloads = Preloads(cache.session, is_on=True)
    kv = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    cache.session.compaction.rebase = Rebase(
        ctx.tp_worker.model_runner.model,
        kv,
        ctx.model_config.context_len,
        has_table=ctx.model_config.model_is_mrope,
    )
    return cache


REGISTRY_ITEM = (RADIX_BACKEND, live_radix_cache)
