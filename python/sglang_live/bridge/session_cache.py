"""SGLang's radix cache with sessions whose KV is bounded, lent while they are idle, and copied.

SGLang keeps a session's KV in one row of its request table, token by token. A cut takes whole
pages out of the middle of that row and the same tokens out of the session's token arrays, so all
that counts tokens goes on agreeing. Only positions remember what has gone: the tokens that stay
keep the ones they were computed with.
"""

import math

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.idle_sessions import IdleSessions
from sglang_live.bridge.inbox import RADIX_BACKEND, policies_from_env
from sglang_live.bridge.kv_record import LiveKvInfo, Place
from sglang_live.bridge.modelled_link import link_from_env
from sglang_live.bridge.preloads import Preloads
from sglang_live.bridge.session_cut import SessionCuts
from sglang_live.bridge.session_rebase import Rebase
from sglang_live.bridge.session_tier import SessionTier
from sglang_live.kv.retention import Cut


class LiveSession(StreamingSession):
    """Slots of SGLang's streaming sessions.

    idle: None: sessions keep their KV until they close, as upstream has it.
    tier: None: what idle sessions give back is computed anew.
    preloads: None: what comes back from the host comes with a prefill.
    """

    def __init__(self, inner: UnifiedRadixCache):
        super().__init__(inner)
        self.cuts = SessionCuts(self)
        self.idle: IdleSessions | None = None
        self.tier: SessionTier | None = None
        self.preloads: Preloads | None = None
        self._sharing = False

    def try_cache_finished_req(self, req: Req) -> bool:
        session = req.session
        if session is None or not session.streaming:
            return False
        if req.finished_reason is None:
            # Retracted; or given up for want of memory, and then nobody goes on with it.
            if isinstance(req.to_finish, FINISH_ABORT):
                self._drop_row(req)
            else:
                self._keep_row(req)
            return True
        if isinstance(req.finished_reason, FINISH_ABORT):
            self._forget_if_cut(session)
        elif session.session_id not in self.slots and req.sampling_params.max_new_tokens == 0:
            self._share(req)
        handled = super().try_cache_finished_req(req)
        if (slot := self.slots.get(session.session_id)) is not None:
            slot.kv = LiveKvInfo.of(slot.kv)
            if req.output_ids:
                # With overlap a step beyond the end may have computed the newest token as well,
                # or not. The next request computes it in any case, and sees the same.
                n_tokens = len(req.origin_input_ids) + len(req.output_ids)
                slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, n_tokens - 1)
            self._now_idle(session.session_id, slot)
        return handled

    def _share(self, req: Req) -> None:
        """A session that begins with a prompt and no reply begins with its instructions.

        Upstream shows the tree only prompts of requests that go on to decode. Here others find
        them, and hold them once for all.
        """
        self._sharing = True
        try:
            self.inner.cache_unfinished_req(req)
        finally:
            self._sharing = False

    def _keep_row(self, req: Req) -> None:
        """The request is retracted: its session keeps what is computed, and it will come back.

        Upstream ends the request for the session as well. The second time it then throws the
        request out of its own session.
        """
        slot = self.slots.get(req.session.session_id)
        is_first = slot is None
        if is_first:
            slot = self.slots[req.session.session_id] = SessionSlot()
        n_outputs = len(req.output_ids)
        self._trim_overshoot(req, n_outputs)
        n_tokens = len(req.origin_input_ids) + n_outputs
        slot.save_from_req(req, is_first=is_first)
        slot.kv = LiveKvInfo.of(slot.kv)
        slot.kv.kv_committed_len = min(n_tokens, slot.kv.kv_allocated_len)
        self._now_idle(req.session.session_id, slot)

    def _drop_row(self, req: Req) -> None:
        session, kv = req.session, req.detach_kv()
        self._forget_if_cut(session)
        if session.session_id not in self.slots:
            self.slots[session.session_id] = SessionSlot(
                kv=kv,
                last_node=req.last_node,
                lock_receipt=req.lock_receipt,
                swa_prefix_lock_released=req.swa_prefix_lock_released,
            )
        self.release_session(session.session_id)
        session.abort_req()

    def _forget_if_cut(self, session: Session) -> None:
        """The session of an aborted request falls back to the one before, whose tokens were cut.

        What it would compute from these would not be what it held: it begins anew.
        """
        slot = self.slots.get(session.session_id)
        if slot is not None and getattr(slot.kv, "n_cut", 0):
            session.req_nodes.clear()
            session.committed_origin_len = None
            session.committed_unpadded_len = session.committed_fill_len = None

    # --- who holds memory that others may have ---

    def _now_idle(self, session_id: str, slot: SessionSlot) -> None:
        if self.idle is not None:
            slot.virtual_node = Place(session_id)
            self.idle.answered(session_id)
            self.resized(session_id)
        if self.tier is not None:
            self.tier.is_idle(session_id)

    def resized(self, session_id: str) -> None:
        """To be called when the KV of a session without a request is longer or shorter now."""
        slot = self.slots.get(session_id)
        if self.idle is None or slot is None or not isinstance(slot.virtual_node, Place):
            return
        if slot.virtual_node.n_pins:
            return
        n_tokens = ceil_align(slot.kv.kv_allocated_len, self.page_size)
        self.idle.put(session_id, n_tokens - slot.kv.cache_protected_len)

    def try_match_prefix(self, params: MatchPrefixParams) -> MatchResult | None:
        result = self._match_emptied(params.req) or super().try_match_prefix(params)
        if result is None:
            return None
        session_id = params.req.session.session_id
        self.resized(session_id)
        if self.preloads is not None:
            self.preloads.forget(session_id)
        if self.tier is not None:
            result = self.tier.with_host_hit(session_id, result, len(params.key))
        return result

    def _match_emptied(self, req: Req | None) -> MatchResult | None:
        """A session that gave everything back, its row included, begins a row of its own again."""
        if req is None or req.session is None or not req.session.streaming:
            return None
        slot = self.slots.get(req.session.session_id)
        if slot is None or slot.kv.holds_kv or req.to_finish is not None:
            return None
        slot.restore_to_req(req)
        node, device = slot.virtual_node, self.req_to_token_pool.device
        return MatchResult(
            device_indices=torch.empty(0, dtype=torch.int64, device=device),
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            cache_protected_len=0,
        )

    def try_cache_unfinished_req(self, req: Req, chunked: bool = False, **kwargs) -> bool:
        if self._sharing:
            return False
        if self.idle is not None and not chunked and req.session and req.session.streaming:
            # In the tree, a first prompt would be locked until the session closes.
            return True
        return super().try_cache_unfinished_req(req, chunked=chunked, **kwargs)

    def try_inc_lock_ref(self, node):
        if isinstance(node, Place):
            node.n_pins += 1
            self.idle.remove(node.session_id)
            if node.own_from is not None:
                self.slots[node.session_id].kv.cache_protected_len = node.own_from
                node.own_from = None
        return super().try_inc_lock_ref(node)

    def try_dec_lock_ref(self, node, params=None):
        if isinstance(node, Place) and node.n_pins:
            node.n_pins -= 1
            self.resized(node.session_id)
        return super().try_dec_lock_ref(node, params)

    def release_session(self, session_id: str) -> None:
        if self.idle is not None:
            self.idle.forget(session_id)
        if self.preloads is not None:
            self.preloads.forget(session_id)
        if self.tier is not None:
            self.tier.forget(session_id)
        super().release_session(session_id)

    def n_computed(self, session_id: str) -> int:
        """Tokens of it that a request need not compute."""
        slot = self.slots.get(session_id)
        if slot is None:
            return 0
        on_device = slot.kv.kv_committed_len
        return on_device if self.tier is None else self.tier.end_of(session_id, on_device)

    def session_held_tokens(self, active_pool_idxs: set | None = None) -> int:
        held = super().session_held_tokens(active_pool_idxs)
        return held if self.idle is None else held - self.idle.tokens

    def give_back(self, n_tokens: int, later_than_s: float = -math.inf) -> int:
        """Free so much of idle sessions, if there is so much. Returns what was freed.

        later_than_s: only of those whose KV is needed after that.
        """
        freed = 0
        for session_id, n_victim in self.idle.give_back(n_tokens, later_than_s):
            slot = self.slots[session_id]
            kept = ceil_align(slot.kv.kv_allocated_len, self.page_size) - n_victim
            if self.tier is not None:
                self.tier.save(session_id, slot, kept)
            self._free_tail(slot.kv, kept)
            if kept == 0:
                self.req_to_token_pool.free(slot)
            if self.preloads is not None:
                self.preloads.expect(session_id, self.idle.now_s, self.idle.expected_s(session_id))
            freed += n_victim
        return freed

    # --- tokens of a session are about to go, or to change, where they lie ---

    def is_cut(self, session_id: str, cut: Cut) -> None:
        if self.tier is not None:
            self.tier.is_changing(session_id)
            self.tier.copies.cut(session_id, cut)

    def is_truncated(self, session_id: str, n_tokens: int) -> None:
        if self.tier is not None:
            self.tier.is_changing(session_id)
            self.tier.copies.truncate(session_id, n_tokens)

    def is_changed(self, session_id: str) -> None:
        if self.tier is not None:
            self.tier.is_changing(session_id)
            self.tier.copies.forget(session_id)


class LiveRadixCache(UnifiedRadixCache):
    """Memory of idle sessions counts as evictable here, and goes after the tree's own."""

    def __init__(self, params):
        super().__init__(params)
        self.session = LiveSession(inner=self)

    def _reset_full(self) -> None:
        super()._reset_full()
        session = getattr(self, "session", None)  # also called while we are being built
        if not isinstance(session, LiveSession):
            return
        if session.idle is not None:
            session.idle = IdleSessions(self.page_size)
        if session.tier is not None:
            session.tier.reset()
        if session.preloads is not None:
            session.preloads = Preloads(session)

    # --- memory ---

    def tree_evictable_size(self) -> int:
        return super().evictable_size()

    def evict_tree(self, n_tokens: int) -> int:
        """Returns what was freed of prompts that no call holds."""
        return super().evict(EvictParams(num_tokens=n_tokens)).num_tokens_evicted

    def evictable_size(self) -> int:
        return super().evictable_size() + self._idle_tokens

    def full_evictable_size(self) -> int:
        return super().full_evictable_size() + self._idle_tokens

    def evict(self, params: EvictParams) -> EvictResult:
        return self._and_sessions(params, super().evict(params))

    def evict_for_alloc(self, params: EvictParams) -> EvictResult:
        return self._and_sessions(params, super().evict_for_alloc(params))

    @property
    def _idle_tokens(self) -> int:
        return self.session.idle.tokens if self.session.idle is not None else 0

    def _and_sessions(self, params: EvictParams, result: EvictResult) -> EvictResult:
        # What nobody's call needs goes first: prompts of calls that are over.
        missing = params.num_tokens - result.num_tokens_evicted
        if missing > 0 and self.session.idle is not None:
            result.num_tokens_evicted += self.session.give_back(missing)
        return result

    # --- the host ---

    def init_load_back(self, params: InitLoadBackParams):
        if isinstance(params.best_match_node, Place):
            return self.session.tier.load_back(params.req)
        return super().init_load_back(params)

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self.session.tier is not None:
            self.session.tier.write_back()

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        super().writing_check(write_back=write_back, finish_count=finish_count)
        if write_back and self.session.tier is not None:
            self.session.tier.copies.all_written()

    def _finish_write_through_ack(self, ack_id: int) -> None:
        tier = self.session.tier
        if tier is None or not tier.copies.acknowledged(ack_id):
            super()._finish_write_through_ack(ack_id)

    def _log_write_ack_metrics(self, ack) -> None:
        if self.session.tier is not None:
            self.session.tier.copies.measure(ack, self.session.tier.copies.to_host)
        super()._log_write_ack_metrics(ack)

    def loading_check(self, finish_count: int | None = None) -> None:
        tier, controller = self.session.tier, self.cache_controller
        if tier is not None and controller is not None:
            queue = controller.ack_load_queue
            n = self._count_ready_acks(queue) if finish_count is None else finish_count
            for ack in queue[:n]:
                tier.copies.measure(ack, tier.copies.to_device)
                # What SGLang does not know it does not look for.
                ack.node_ids[:] = [i for i in ack.node_ids if not tier.copies.acknowledged(i)]
        super().loading_check(finish_count)


def live_radix_cache(ctx: TreeCacheBuildContext) -> UnifiedRadixCache:
    """Factory for SGLang's registry.

    Raises:
        ValueError: this model's sessions cannot be cut.
    """
    if ctx.is_hybrid_swa or ctx.is_hybrid_ssm or ctx.disable_radix_cache:
        raise ValueError("bounded sessions need a radix cache and plain attention in every layer")
    if not ctx.model_config.model_is_mrope:
        # Their positions would follow from the length of what is left.
        raise ValueError("bounded sessions need a model with M-RoPE, whose positions are a table")
    cache = create_unified_radix_cache(ctx, cache_class=LiveRadixCache)
    policies = policies_from_env()
    if "nextuse" in policies:
        cache.session.idle = IdleSessions(cache.page_size)
        if (controller := cache.cache_controller) is not None:
            if (link := link_from_env(controller.io_backend)) is not None:
                controller.l2_transfer_engine = link
            cache.session.tier = SessionTier(cache.session)
            if "preload" in policies:
                cache.session.preloads = Preloads(cache.session)
    kv = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    cache.session.cuts.rebase = Rebase(
        ctx.tp_worker.model_runner.model, kv, ctx.model_config.context_len
    )
    return cache


REGISTRY_ITEM = (RADIX_BACKEND, live_radix_cache)
