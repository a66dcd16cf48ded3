"""Cuts: whole pages leave the middle of a session, on the device, on the host, in its tokens."""

import logging

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot

from sglang_live.bridge.kv_record import LiveKvInfo
from sglang_live.bridge.session.media import compact_media, media_spans
from sglang_live.bridge.session.rebase import Rebase
from sglang_live.bridge.session.row_compact import compact_row
from sglang_live.bridge.session.tokens import (
    confirm_lengths,
    cut_tokens,
    fold_outputs,
    length_of,
)
from sglang_live.kv.retention import Compaction, RetentionConfig, compaction_of

log = logging.getLogger(__name__)


class SessionCompaction:
    """
    Args:
        sessions: the LiveSession whose slots are cut.
    Attributes:
        rebase: set once the model is there.
    """

    rebase: Rebase

    def __init__(self, sessions):
        self._sessions = sessions
        self.n_rebased = 0

    def cut(self, session: Session, config: RetentionConfig) -> Compaction | None:
        """Drop what lies between sink and window. None: nothing does, or it cannot be dropped now.

        Args:
            session: if a request of it is running, nothing can.
            config: with a number of sink tokens.
        """
        slot = self._sessions.slots.get(session.session_id)
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
            self._rebase_if_due(session.session_id, slot.kv, node.req)
            self._sessions.resized(session.session_id)
        return cut

    def _rebase_if_due(self, session_id: str, kv: LiveKvInfo, req: Req) -> None:
        if not self.rebase.due(req.multimodal_inputs, kv.sink_tokens):
            return
        self._sessions.is_changed(session_id)
        row = self._sessions.req_to_token_pool.req_to_token[kv.req_pool_idx]
        rows = row[kv.sink_tokens : kv.kv_committed_len]
        req.multimodal_inputs = self.rebase.rebase(req.multimodal_inputs, kv.sink_tokens, rows)
        self.n_rebased += 1

    def cut_running(self, req: Req, config: RetentionConfig) -> Compaction | None:
        """The same while the request decodes: what it said itself stays, however long it is.

        Its batch must be told that it is shorter now.
        """
        slot = self._sessions.slots.get(req.session.session_id)
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
    ) -> Compaction | None:
        """n_reply: tokens at the end that stay, whatever the window."""
        kv = slot.kv
        cut = compaction_of(
            n_tokens=kv.kv_committed_len,
            sink_tokens=config.sink_tokens,
            window_tokens=max(config.window_tokens, n_reply),
            page_size=self._sessions.page_size,
            owned_from=kv.cache_protected_len,
            # With the tokens that open and close an item: one of them alone means nothing.
            media=[(a - 1, b + 1) for a, b in media_spans(req.multimodal_inputs)],
            slack_tokens=config.slack_tokens,
        )
        # Two holes would need two offsets: the sink of the first cut stays.
        if cut is None or (kv.n_dropped and cut.begin != kv.sink_tokens):
            return None
        if kv.cache_protected_len > cut.begin and not self._hand_over_prefix(slot, req, cut.begin):
            return None
        return cut

    def _drop(self, slot: SessionSlot, req: Req, cut: Compaction, n_tokens: int) -> None:
        """n_tokens: of the session, all that is known of its reply included."""
        kv = slot.kv
        own_from = max(kv.cache_protected_len, cut.begin)
        kv.cache_protected_len = min(kv.cache_protected_len, cut.begin)
        self._sessions.is_compacted(req.session.session_id, cut)
        compact_row(self._sessions, kv, cut, own_from)
        cut_tokens(req, cut)
        req.multimodal_inputs = compact_media(req.multimodal_inputs, cut, n_tokens)
        kv.sink_tokens, kv.n_dropped = cut.begin, kv.n_dropped + cut.n_tokens

    def _hand_over_prefix(self, slot: SessionSlot, req: Req, begin: int) -> bool:
        """Let go of the tree's nodes behind `begin`; the session's first prompt is in the tree.

        What it no longer uses there, others may, until it is evicted.
        """
        if slot.kv.cache_protected_len <= begin:
            return True
        key = RadixKey(req.origin_input_ids, req.extra_key, limit=begin, cache_salt=req.cache_salt)
        match = self._sessions.inner.tree_core.match_prefix(MatchPrefixParams(key=key, req=None))
        self._sessions.inner._apply_cache_actions(match.cache_actions)
        if len(match.device_indices) != begin:
            log.warning("sink_not_in_tree session=%s", req.session and req.session.session_id)
            return False
        lock = self._sessions.inner.inc_lock_ref(match.last_device_node)
        skip = {"skip_swa": True} if slot.swa_prefix_lock_released else {}
        self._sessions.inner.dec_lock_ref(slot.last_node, slot.lock_receipt, **skip)
        slot.last_node, slot.lock_receipt = match.last_device_node, lock.to_dec_params()
        return True
