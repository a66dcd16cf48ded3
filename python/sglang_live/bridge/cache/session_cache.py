"""SGLang's session slots, with KV that is compacted, evicted while idle, and copied to the host.

SGLang keeps a session's KV in one row of its request table, token by token. Compaction removes
whole pages from the middle of that row and the same tokens from the session's token arrays, so
all counts of tokens stay consistent. Only positions show the gap: the remaining tokens keep the
positions that they were computed with.
"""

import math
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.session.compact import SessionCompaction
from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.session.kv_record import LiveKvInfo, SessionNode, n_on_device
from sglang_live.bridge.tiers.no_tier import NoTier
from sglang_live.bridge.tiers.preload import Preloads
from sglang_live.kv.retention import Compaction


class SessionCache(StreamingSession):
    """Slots of SGLang's streaming sessions.

    Attributes:
        evicts_idle: whether idle sessions lose KV that others need. Otherwise sessions keep it
            until they close, as upstream's do, and none is in idle.
        idle: sessions without a request, as they are evicted.
        tier: where evicted KV is kept.
        preloads: of KV on the host that is loaded before a prefill.
    """

    def __init__(self, cache: UnifiedRadixCache):
        super().__init__(cache)
        self.compaction = SessionCompaction(self)
        self.evicts_idle = False
        self.idle = IdleSessions(cache.page_size)
        self.tier = NoTier()
        self.preloads = Preloads(self, is_on=False)
        # Idle sessions whose row holds nothing but their part of the tree.
        self._bare_rows: dict[str, None] = {}

    def take(self, req: Req) -> None:
        if req.session is not None and req.session.streaming:
            req.kv = LiveKvInfo.of(req.kv)
        super().take(req)

    def try_cache_finished_req(self, req: Req) -> bool:
        session = req.session
        if session is None or not session.streaming:
            return False
        slot = self.borrowed_slot(req)
        assert slot is not None, f"{req.rid} does not run on its session's row"
        if isinstance(req.finished_reason or req.to_finish, FINISH_ABORT):
            self._hand_back(req, slot)
            return False
        if req.finished_reason is None:
            self._keep_row(req, slot)
            return True
        if slot.publishes_prompt and req.sampling_params.max_new_tokens == 0:
            # Upstream inserts only prompts of requests that decode into the tree. This one holds
            # the instructions: in the tree, sessions with the same instructions share their KV.
            super().try_checkpoint(req, up_to=req.extend_end)
        super().try_cache_finished_req(req)
        if req.output_ids:
            # With overlap, a step beyond the end may or may not have computed the newest token.
            # The next request always computes it, so its input is the same either way.
            n_tokens = len(req.origin_input_ids) + len(req.output_ids)
            slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, n_tokens - 1)
        self._set_idle(session.session_id, slot)
        return True

    def _keep_row(self, req: Req, slot: SessionSlot) -> None:
        """Keep the computed KV of a retracted request in its session.

        Upstream ends the request for the session instead, and at a second retraction removes the
        request from its own session.
        """
        n_outputs = len(req.output_ids)
        self._trim_overshoot(req, n_outputs)
        n_tokens = len(req.origin_input_ids) + n_outputs
        req.detach_kv()
        slot.publishes_prompt = False
        # A resumed request computes its newest token again, as any request does.
        slot.kv.kv_committed_len = min(n_tokens - 1, slot.kv.kv_allocated_len)
        self._set_idle(req.session.session_id, slot)

    def _hand_back(self, req: Req, slot: SessionSlot) -> None:
        """Give an aborted request its row and tree lock, which upstream then releases.

        Without a finished_reason, the request is aborted for lack of memory, and is not resumed.
        """
        session = req.session
        self.forget_if_compacted(session)
        self._forget(session.session_id)
        del self.slots[session.session_id]
        req.lock, slot.lock = slot.lock, None
        # Upstream inserts the KV into the tree, where token ids alone must determine it.
        req.skip_radix_cache_insert = True
        if req.finished_reason is not None:
            req.release_mm_inputs_on_abort()
        session.abort_req()

    def drop(self, req: Req) -> None:
        """Drop the KV of a session whose retracted request was aborted in the queue: the request's
        tokens will not be the session's.
        """
        if req.session is not None and req.session.streaming:
            self.forget_if_compacted(req.session)
            self.release_session(req.session.session_id)

    def forget_if_compacted(self, session: Session) -> None:
        """Empty the session of an aborted request, if it was compacted.

        Such a session returns to its previous request, whose token arrays lack the dropped tokens:
        KV computed from them would differ from the KV that it held.
        """
        slot = self.slots.get(session.session_id)
        if slot is not None and isinstance(slot.kv, LiveKvInfo) and slot.kv.n_dropped:
            session.req_nodes.clear()
            session.committed_origin_len = None
            session.committed_unpadded_len = session.committed_fill_len = None

    # --- idle sessions, whose memory is evictable ---

    def _set_idle(self, session_id: str, slot: SessionSlot) -> None:
        if self.evicts_idle:
            slot.virtual_node = SessionNode(session_id)
            self.idle.request_ended(session_id)
            self.resized(session_id)
        self.tier.set_idle(session_id)

    def resized(self, session_id: str) -> None:
        """To be called when the length of an idle session's KV has changed."""
        slot = self.slots.get(session_id)
        if slot is None or not isinstance(slot.virtual_node, SessionNode):
            return
        if slot.virtual_node.n_pins:
            return
        n_tokens = ceil_align(slot.kv.kv_allocated_len, self.cache.page_size)
        self.idle.put(session_id, n_tokens - slot.kv.cache_protected_len)
        if self._holds_only_a_row(slot):
            self._bare_rows[session_id] = None
        else:
            self._bare_rows.pop(session_id, None)

    def try_match_prefix(self, params: MatchPrefixParams) -> MatchResult | None:
        result = self._match_evicted(params.req) or super().try_match_prefix(params)
        if result is None:
            return None
        session_id = params.req.session.session_id
        self.resized(session_id)
        self.preloads.forget(session_id)
        return self.tier.with_host_hit(session_id, result, len(params.key))

    def _match_evicted(self, req: Req | None) -> MatchResult | None:
        """The match of a session whose row was evicted: its prefix in the tree, for a new row."""
        if req is None or req.session is None or not req.session.streaming:
            return None
        slot = self.slots.get(req.session.session_id)
        if slot is None or slot.kv.holds_kv:
            return None
        if req.to_finish is not None:
            # It will not run, and its end must not count as the end of the session's request.
            req.release_mm_inputs_on_abort()
            req.session.abort_req()
            req.session = None
            return None
        req.kv = slot.kv
        node = slot.virtual_node
        return MatchResult(
            device_prefix_len=len(slot.kv.parked),
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            cache_protected_len=len(slot.kv.parked),
        )

    def try_checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> bool:
        if self.evicts_idle and self.borrowed_slot(req) is not None:
            # In the tree, a first prompt would be locked until the session closes.
            return True
        handled: bool = super().try_checkpoint(req, up_to=up_to, **kwargs)
        return handled

    def pin(self, node: SessionNode) -> TreeLock:
        node.n_pins += 1
        self.idle.remove(node.session_id)
        self._correct_protected_len(node)
        return TreeLock(node, DecLockRefParams())

    def unpin(self, node: SessionNode) -> None:
        node.n_pins -= 1
        if not node.n_pins:
            self._correct_protected_len(node)
        self.resized(node.session_id)

    def _correct_protected_len(self, node: SessionNode) -> None:
        """Restore cache_protected_len after SGLang counted loaded KV as part of the tree."""
        if node.own_from is not None and node.session_id in self.slots:
            self.slots[node.session_id].kv.cache_protected_len = node.own_from
        node.own_from = None

    def release_session(self, session_id: str) -> None:
        self._forget(session_id)
        super().release_session(session_id)

    def _forget(self, session_id: str) -> None:
        self._bare_rows.pop(session_id, None)
        self.idle.forget(session_id)
        self.preloads.forget(session_id)
        self.tier.forget(session_id)

    def n_computed(self, session_id: str) -> int:
        """Tokens of the session that its next request need not compute."""
        return self.tier.end_of(session_id, n_on_device(self.slots, session_id))

    def n_kept(self, session_id: str) -> int:
        """Tokens of the session whose device memory cannot be evicted."""
        slot = self.slots.get(session_id)
        if slot is None:
            return 0
        kept: int = slot.kv.cache_protected_len
        return kept if session_id in self.idle else int(slot.kv.kv_committed_len)

    def update_tiers(self) -> None:
        """To be called once a round."""
        for session_id in self.tier.settle():
            if self.idle.is_speaking(session_id):
                self.preloads.speech_started(session_id, self.idle.now_s)
        self.tier.write_back()

    def evict_idle(self, n_tokens: int, later_than_s: float = -math.inf) -> int:
        """Evict n_tokens of idle sessions, or as many as there are. Returns the tokens freed.

        Args:
            later_than_s: evict only sessions whose KV is expected to be needed after that time.
        """
        freed = 0
        for session_id, n_victim in self.idle.pick_victims(n_tokens, later_than_s):
            slot = self.slots[session_id]
            kept = ceil_align(slot.kv.kv_allocated_len, self.cache.page_size) - n_victim
            self.tier.save(session_id, slot, kept)
            self._free_tail(slot.kv, kept)
            if kept == slot.kv.cache_protected_len:
                self.park(slot)
            self.preloads.expect(session_id, self.idle.now_s, self.idle.expected_s(session_id))
            freed += n_victim
        return freed

    def park(self, slot: SessionSlot) -> None:
        """Free the row of a session that has no KV of its own on the device."""
        row = self.cache.req_to_token_pool.req_to_token[slot.kv.req_pool_idx]
        slot.kv.parked = row[: slot.kv.cache_protected_len].to(torch.int64)
        self.cache.req_to_token_pool.free(slot)

    def has_row(self, session_id: str) -> bool:
        slot = self.slots.get(session_id)
        return slot is not None and slot.kv.holds_kv

    def evict_rows(self, n_rows: int) -> None:
        """Free rows of idle sessions: first of those without own KV, then in order of eviction."""
        while n_rows > 0 and self._bare_rows:
            session_id = next(iter(self._bare_rows))
            del self._bare_rows[session_id]
            slot = self.slots.get(session_id)
            # It may have been parked or pinned since; then resized() adds it again.
            if slot is not None and self._holds_only_a_row(slot):
                self.park(slot)
                n_rows -= 1
        while n_rows > 0 and (victim := self.idle.next_victim()) is not None:
            self.evict_idle(victim.n_tokens)
            n_rows -= 1

    def _holds_only_a_row(self, slot: SessionSlot) -> bool:
        node, kv = slot.virtual_node, slot.kv
        is_idle = isinstance(node, SessionNode) and not node.n_pins
        return is_idle and kv.holds_kv and kv.kv_allocated_len == kv.cache_protected_len

    # --- to be called before KV of a session is dropped or changed in place ---

    def before_compaction(self, session_id: str, compaction: Compaction) -> None:
        self.tier.compact(session_id, compaction)

    def before_truncation(self, session_id: str, n_tokens: int) -> None:
        self.tier.truncate(session_id, n_tokens)

    def before_change(self, session_id: str) -> None:
        self.tier.discard(session_id)
