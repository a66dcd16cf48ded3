"""SGLang's radix cache with sessions whose KV is bounded: a sink, a window, and nothing between.

SGLang keeps a session's KV in one row of its request table, token by token. A cut takes whole
pages out of the middle of that row and the same tokens out of the session's token arrays, so all
that counts tokens goes on agreeing. Only positions remember what has gone: the tokens that stay
keep the ones they were computed with.
"""

import logging
import os
from dataclasses import fields

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.idle_sessions import IdleSessions, Place
from sglang_live.bridge.inbox import RADIX_BACKEND, policies_from_env
from sglang_live.bridge.media_cut import cut_media, media_spans
from sglang_live.bridge.session_rebase import Rebase
from sglang_live.bridge.session_tokens import (
    confirm_lengths,
    cut_tokens,
    fold_outputs,
    length_of,
)
from sglang_live.kv.retention import Cut, RetentionConfig, cut_of

log = logging.getLogger(__name__)

# For tests: what has left a session is overwritten, so that nobody can read it unnoticed.
POISON_ENV = "SGLANG_LIVE_POISON_FREED_KV"


class LiveKvInfo(ReqKvInfo):
    """A session's KV record.

    sink_tokens, n_cut: the session has dropped n_cut tokens behind its first sink_tokens, so its
        token at place p >= sink_tokens has position p + n_cut.
    """

    sink_tokens: int = 0
    n_cut: int = 0

    @staticmethod
    def of(kv: ReqKvInfo) -> "LiveKvInfo":
        # Upstream's record has slots and no room for more; a subclass's instances have.
        if isinstance(kv, LiveKvInfo):
            return kv
        live = LiveKvInfo()
        for field in fields(ReqKvInfo):
            setattr(live, field.name, getattr(kv, field.name))
        return live

    def place_of(self, position: int) -> int | None:
        """Where the session ends that is to end there; None: what was there was dropped.

        Within the sink neither: nothing would be left to say that tokens are missing behind it.
        """
        if not self.n_cut:
            return position
        return position - self.n_cut if position >= self.sink_tokens + self.n_cut else None


class LiveSession(StreamingSession):
    """Slots of SGLang's streaming sessions, which can be cut between two requests."""

    rebase: Rebase  # set once the model is there

    def __init__(self, inner: UnifiedRadixCache):
        super().__init__(inner)
        # None: sessions keep their KV until they close, as upstream has it.
        self.idle: IdleSessions | None = None
        self.n_rebased = 0
        self._sharing = False
        self._poison = bool(os.environ.get(POISON_ENV))

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
        if result is not None:
            self.resized(params.req.session.session_id)
        return result

    def _match_emptied(self, req: Req | None) -> MatchResult | None:
        """A session that gave everything back, its row included, begins a row of its own again."""
        if req is None or req.session is None or not req.session.streaming:
            return None
        slot = self.slots.get(req.session.session_id)
        if slot is None or slot.kv.holds_kv:
            return None
        if req.to_finish is not None:
            # It will not run, and must not end in the session's name.
            req.session.abort_req()
            req.session = None
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
        return super().try_inc_lock_ref(node)

    def try_dec_lock_ref(self, node, params=None):
        if isinstance(node, Place) and node.n_pins:
            node.n_pins -= 1
            self.resized(node.session_id)
        return super().try_dec_lock_ref(node, params)

    def release_session(self, session_id: str) -> None:
        if self.idle is not None:
            self.idle.forget(session_id)
        super().release_session(session_id)

    def session_held_tokens(self, active_pool_idxs: set | None = None) -> int:
        held = super().session_held_tokens(active_pool_idxs)
        return held if self.idle is None else held - self.idle.tokens

    def give_back(self, n_tokens: int) -> int:
        """Free so much of idle sessions, if there is so much. Returns what was freed."""
        freed = 0
        for session_id, n_victim in self.idle.give_back(n_tokens):
            slot = self.slots[session_id]
            kept = ceil_align(slot.kv.kv_allocated_len, self.page_size) - n_victim
            self._free_tail(slot.kv, kept)
            if kept == 0:
                self.req_to_token_pool.free(slot)
            freed += n_victim
        return freed

    # --- cutting ---

    def cut(self, session: Session, config: RetentionConfig) -> Cut | None:
        """Drop what lies between sink and window. None: nothing does, or it cannot be dropped now.

        Args:
            session: if a request of it is running, nothing can.
            config: with a number of sink tokens.
        """
        slot = self.slots.get(session.session_id)
        if slot is None or not slot.kv.holds_kv or session._inflight or not session.req_nodes:
            return None
        [node] = session.req_nodes.values()
        n_tokens = length_of(session, node.req)
        if slot.kv.kv_committed_len < n_tokens - 1:
            return None  # part of it was given back; the next request computes it first
        cut = self._choose(slot, node.req, config, n_reply=0)
        if cut is not None:
            fold_outputs(session, node.req)
            self._drop(slot, node.req, cut, n_tokens)
            confirm_lengths(session, node.req)
            self._rebase_if_due(slot.kv, node.req)
            self.resized(session.session_id)
        return cut

    def _rebase_if_due(self, kv: LiveKvInfo, req: Req) -> None:
        if not self.rebase.due(req.multimodal_inputs, kv.sink_tokens):
            return
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        rows = row[kv.sink_tokens : kv.kv_committed_len]
        req.multimodal_inputs = self.rebase.rebase(req.multimodal_inputs, kv.sink_tokens, rows)
        self.n_rebased += 1

    def cut_running(self, req: Req, config: RetentionConfig) -> Cut | None:
        """The same while the request decodes: what it said itself stays, however long it is.

        Its batch must be told that it is shorter now.
        """
        slot = self.slots.get(req.session.session_id)
        if slot is None or req.kv is not slot.kv:
            return None  # its first request; it has no history yet
        n_reply = slot.kv.kv_committed_len - len(req.origin_input_ids)
        cut = self._choose(slot, req, config, n_reply)
        if cut is not None:
            n_tokens = len(req.origin_input_ids) + len(req.output_ids)
            self._drop(slot, req, cut, n_tokens)
        return cut

    def _choose(
        self, slot: SessionSlot, req: Req, config: RetentionConfig, n_reply: int
    ) -> Cut | None:
        """n_reply: tokens at the end that stay, whatever the window."""
        kv = slot.kv
        cut = cut_of(
            n_tokens=kv.kv_committed_len,
            sink_tokens=config.sink_tokens,
            window_tokens=max(config.window_tokens, n_reply),
            page_size=self.page_size,
            owned_from=kv.cache_protected_len,
            # With the tokens that open and close an item: one of them alone means nothing.
            media=[(a - 1, b + 1) for a, b in media_spans(req.multimodal_inputs)],
            slack_tokens=config.slack_tokens,
        )
        # Two holes would need two offsets: the sink of the first cut stays.
        if cut is None or (kv.n_cut and cut.begin != kv.sink_tokens):
            return None
        if kv.cache_protected_len > cut.begin and not self._hand_over_prefix(slot, req, cut.begin):
            return None
        return cut

    def _drop(self, slot: SessionSlot, req: Req, cut: Cut, n_tokens: int) -> None:
        """n_tokens: of the session, all that is known of its reply included."""
        kv = slot.kv
        own_from = max(kv.cache_protected_len, cut.begin)
        kv.cache_protected_len = min(kv.cache_protected_len, cut.begin)
        self._cut_row(kv, cut, own_from)
        cut_tokens(req, cut)
        req.multimodal_inputs = cut_media(req.multimodal_inputs, cut, n_tokens)
        kv.sink_tokens, kv.n_cut = cut.begin, kv.n_cut + cut.n_tokens

    def _cut_row(self, kv: LiveKvInfo, cut: Cut, own_from: int) -> None:
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        if self._poison:
            self._overwrite(row[own_from : cut.end])
        self.free_kv_row(kv, [(own_from, cut.end)])
        # Whole pages, so the last one moves to its end.
        end = -(-kv.kv_allocated_len // self.page_size) * self.page_size
        row[cut.begin : cut.begin + end - cut.end] = row[cut.end : end].clone()
        kv.kv_committed_len -= cut.n_tokens
        kv.kv_allocated_len -= cut.n_tokens

    def _overwrite(self, slots: torch.Tensor) -> None:
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
            pool.get_key_buffer(layer)[slots.long()] = float("nan")
            pool.get_value_buffer(layer)[slots.long()] = float("nan")

    def _hand_over_prefix(self, slot: SessionSlot, req: Req, begin: int) -> bool:
        """Let go of the tree's nodes behind `begin`; the session's first prompt is in the tree.

        What it no longer uses there, others may, until it is evicted.
        """
        if slot.kv.cache_protected_len <= begin:
            return True
        key = RadixKey(req.origin_input_ids, req.extra_key, limit=begin, cache_salt=req.cache_salt)
        match = self.inner.tree_core.match_prefix(MatchPrefixParams(key=key, req=None))
        self.inner._apply_cache_actions(match.cache_actions)
        if len(match.device_indices) != begin:
            log.warning("sink_not_in_tree session=%s", req.session and req.session.session_id)
            return False
        lock = self.inner.inc_lock_ref(match.last_device_node)
        skip = {"skip_swa": True} if slot.swa_prefix_lock_released else {}
        self.inner.dec_lock_ref(slot.last_node, slot.lock_receipt, **skip)
        slot.last_node, slot.lock_receipt = match.last_device_node, lock.to_dec_params()
        return True


class LiveRadixCache(UnifiedRadixCache):
    """Memory of idle sessions counts as evictable here, and goes after the tree's own."""

    def __init__(self, params):
        super().__init__(params)
        self.session = LiveSession(inner=self)

    def _reset_full(self) -> None:
        super()._reset_full()
        session = getattr(self, "session", None)  # also called while we are being built
        if isinstance(session, LiveSession) and session.idle is not None:
            session.idle = IdleSessions(self.page_size)

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
    if "nextuse" in policies_from_env():
        cache.session.idle = IdleSessions(cache.page_size)
    kv = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    cache.session.rebase = Rebase(
        ctx.tp_worker.model_runner.model, kv, ctx.model_config.context_len
    )
    return cache


REGISTRY_ITEM = (RADIX_BACKEND, live_radix_cache)
