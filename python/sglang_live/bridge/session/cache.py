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
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
from sglang.srt.utils.common import ceil_align

from sglang_live.bridge.kv_record import LiveKvInfo, Place
from sglang_live.bridge.session.compact import SessionCompaction
from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.tiers.host import SessionTier
from sglang_live.bridge.tiers.preload import Preloads
from sglang_live.kv.retention import Compaction


class SessionCache(StreamingSession):
    """Slots of SGLang's streaming sessions.

    idle: None: sessions keep their KV until they close, as upstream has it.
    tier: None: what idle sessions give back is computed anew.
    preloads: None: what comes back from the host comes with a prefill.
    """

    def __init__(self, inner: UnifiedRadixCache):
        super().__init__(inner)
        self.cuts = SessionCompaction(self)
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
            self.forget_if_compacted(session)
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
        # It computes its newest token again when it comes back, as any request does.
        slot.kv.kv_committed_len = min(n_tokens - 1, slot.kv.kv_allocated_len)
        self._now_idle(req.session.session_id, slot)

    def _drop_row(self, req: Req) -> None:
        session, kv = req.session, req.detach_kv()
        self.forget_if_compacted(session)
        if session.session_id not in self.slots:
            self.slots[session.session_id] = SessionSlot(
                kv=kv,
                last_node=req.last_node,
                lock_receipt=req.lock_receipt,
                swa_prefix_lock_released=req.swa_prefix_lock_released,
            )
        self.release_session(session.session_id)
        session.abort_req()

    def forget_if_compacted(self, session: Session) -> None:
        """The session of an aborted request falls back to the one before, whose tokens were cut.

        What it would compute from these would not be what it held: it begins anew.
        """
        slot = self.slots.get(session.session_id)
        if slot is not None and getattr(slot.kv, "n_dropped", 0):
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
        if slot is None or slot.kv.holds_kv:
            return None
        if req.to_finish is not None:
            # It will not run, and must not end in the session's name.
            req.session.abort_req()
            req.session = None
            return None
        slot.restore_to_req(req)
        node = slot.virtual_node
        return MatchResult(
            device_indices=slot.kv.parked,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            cache_protected_len=len(slot.kv.parked),
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
            self._set_right(node)
        return super().try_inc_lock_ref(node)

    def try_dec_lock_ref(self, node, params=None):
        if isinstance(node, Place) and node.n_pins:
            node.n_pins -= 1
            if not node.n_pins:
                self._set_right(node)
            self.resized(node.session_id)
        return super().try_dec_lock_ref(node, params)

    def _set_right(self, node: Place) -> None:
        if node.own_from is not None and node.session_id in self.slots:
            self.slots[node.session_id].kv.cache_protected_len = node.own_from
        node.own_from = None

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

    def look_after_tiers(self) -> None:
        """Once a round."""
        if self.tier is None:
            return
        for session_id in self.tier.settle():
            if self.preloads is not None and self.idle.is_speaking(session_id):
                self.preloads.speaks(session_id, self.idle.now_s)
        self.tier.write_back()

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
            if kept == slot.kv.cache_protected_len:
                self.park(slot)
            if self.preloads is not None:
                self.preloads.expect(session_id, self.idle.now_s, self.idle.expected_s(session_id))
            freed += n_victim
        return freed

    def park(self, slot: SessionSlot) -> None:
        """It has nothing of its own on the device: its row serves somebody else meanwhile."""
        row = self.req_to_token_pool.req_to_token[slot.kv.req_pool_idx]
        slot.kv.parked = row[: slot.kv.cache_protected_len].to(torch.int64)
        self.req_to_token_pool.free(slot)

    def has_row(self, session_id: str) -> bool:
        slot = self.slots.get(session_id)
        return slot is not None and slot.kv.holds_kv

    def give_back_rows(self, n_rows: int) -> None:
        """Of idle sessions: of those with nothing else to give, then of who is expected last."""
        for slot in self.slots.values():
            if n_rows > 0 and self._holds_a_row_alone(slot):
                self.park(slot)
                n_rows -= 1
        while n_rows > 0 and (last := self.idle.first()) is not None:
            self.give_back(last.n_tokens)
            n_rows -= 1

    def _holds_a_row_alone(self, slot: SessionSlot) -> bool:
        node, kv = slot.virtual_node, slot.kv
        is_idle = isinstance(node, Place) and not node.n_pins
        return is_idle and kv.holds_kv and kv.kv_allocated_len == kv.cache_protected_len

    # --- tokens of a session are about to go, or to change, where they lie ---

    def is_compacted(self, session_id: str, cut: Compaction) -> None:
        if self.tier is not None:
            self.tier.cut(session_id, cut)

    def is_truncated(self, session_id: str, n_tokens: int) -> None:
        if self.tier is not None:
            self.tier.truncate(session_id, n_tokens)

    def is_changed(self, session_id: str) -> None:
        if self.tier is not None:
            self.tier.discard(session_id)
