"""Compaction: whole pages leave the middle of a session, on device and host, and in its tokens.

In: a session and its RetentionConfig. Out: the Compaction that was applied.
Owner: one SessionCompaction per session cache. compact_row and shorten also serve the talker.
"""

import logging
from array import array
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import MultimodalInputs, Req, ReqKvInfo, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot
from torch import Tensor, nn

from sglang_live.bridge.session.kv_record import LiveKvInfo
from sglang_live.bridge.session.media import (
    compact_media,
    media_spans,
    position_gap,
    shift_positions,
)
from sglang_live.kernels.rope_rebase import rebase_keys
from sglang_live.kv.retention import (
    REBASE_RESERVE_TOKENS,
    Compaction,
    RetentionConfig,
    compaction_of,
    rebase_due,
)
from sglang_live.models.host_copy import copy_to

log = logging.getLogger(__name__)


class SessionCompaction:
    """
    Args:
        sessions: the SessionCache whose slots are compacted.
    Attributes:
        rebase: set once the model is loaded.
    """

    rebase: "Rebase"

    def __init__(self, sessions: Any):
        self._sessions = sessions
        self.n_rebased = 0

    def compact(self, session: Session, config: RetentionConfig) -> Compaction | None:
        """Drop what lies between sink and window.

        Returns None if nothing does, or if it cannot be dropped now: a request of the session is
        running, or part of its KV was evicted.

        Args:
            config: with a number of sink tokens.
        """
        slot = self._sessions.slots.get(session.session_id)
        if slot is None or not slot.kv.holds_kv or session._inflight or not session.req_nodes:
            return None
        [node] = session.req_nodes.values()
        n_tokens = length_of(session, node.req)
        if slot.kv.kv_committed_len < n_tokens - 1:
            return None  # part of it was evicted; the next request computes that first
        compaction = self._choose(slot, node.req, config, n_outputs=0)
        if compaction is not None:
            fold_outputs(session, node.req)
            self._drop(slot, node.req, compaction, n_tokens)
            confirm_lengths(session, node.req)
            if self.rebase.has_table:
                self._rebase_if_due(session.session_id, slot.kv, node.req)
            else:
                self._rotate(session.session_id, slot.kv, compaction.n_tokens)
            self._sessions.resized(session.session_id)
        return compaction

    def _rebase_if_due(self, session_id: str, kv: LiveKvInfo, req: Req) -> None:
        if not self.rebase.due(req.multimodal_inputs, kv.sink_tokens):
            return
        gap = position_gap(req.multimodal_inputs, kv.sink_tokens)
        self._rotate(session_id, kv, gap)
        req.multimodal_inputs = shift_positions(
            req.multimodal_inputs, gap, sink_tokens=kv.sink_tokens
        )

    def _rotate(self, session_id: str, kv: LiveKvInfo, gap: int) -> None:
        """Move the keys behind the sink to positions that are smaller by `gap`."""
        self._sessions.before_change(session_id)
        row = self._sessions.cache.req_to_token_pool.req_to_token[kv.req_pool_idx]
        self.rebase.rotate(row[kv.sink_tokens : kv.kv_committed_len], gap)
        self.n_rebased += 1

    def compact_running(self, req: Req, config: RetentionConfig) -> Compaction | None:
        """As compact(), while the request decodes: its own output stays, whatever its length.

        The request's batch must then be passed to shorten().
        """
        slot = self._sessions.slots.get(req.session.session_id)
        if slot is None or req.kv is not slot.kv or slot.publishes_prompt:
            return None  # the session's first request has no history yet
        if not self.rebase.has_table:
            return None  # a step in flight may read the keys that would be rotated
        n_outputs = slot.kv.kv_committed_len - len(req.origin_input_ids)
        compaction = self._choose(slot, req, config, n_outputs)
        if compaction is not None:
            n_tokens = len(req.origin_input_ids) + len(req.output_ids)
            self._drop(slot, req, compaction, n_tokens)
        return compaction

    def _choose(
        self, slot: SessionSlot, req: Req, config: RetentionConfig, n_outputs: int
    ) -> Compaction | None:
        """n_outputs: tokens at the end that stay, whatever the window."""
        kv = slot.kv
        assert config.sink_tokens is not None
        compaction = compaction_of(
            n_tokens=kv.kv_committed_len,
            sink_tokens=config.sink_tokens,
            window_tokens=max(config.window_tokens, n_outputs),
            page_size=self._sessions.cache.page_size,
            owned_from=kv.cache_protected_len,
            # With the tokens that open and close an item: one of them alone means nothing.
            media=[(a - 1, b + 1) for a, b in media_spans(req.multimodal_inputs)],
            slack_tokens=config.slack_tokens,
        )
        # Two gaps would need two offsets, so every compaction keeps the sink of the first.
        if compaction is None or (kv.n_dropped and compaction.begin != kv.sink_tokens):
            return None
        if not self._release_tree_prefix(slot, req, compaction.begin):
            return None
        return compaction

    def _drop(self, slot: SessionSlot, req: Req, compaction: Compaction, n_tokens: int) -> None:
        """n_tokens: of the session, the known output tokens included."""
        kv = slot.kv
        own_from = max(kv.cache_protected_len, compaction.begin)
        kv.cache_protected_len = min(kv.cache_protected_len, compaction.begin)
        self._sessions.before_compaction(req.session.session_id, compaction)
        compact_row(self._sessions.cache, kv, compaction, own_from)
        remove_tokens(req, compaction)
        if self.rebase.has_table:
            req.multimodal_inputs = compact_media(req.multimodal_inputs, compaction, n_tokens)
        kv.sink_tokens = compaction.begin
        kv.n_dropped = kv.n_dropped + compaction.n_tokens

    def _release_tree_prefix(self, slot: SessionSlot, req: Req, begin: int) -> bool:
        """Unlock the tree's nodes behind `begin`; the session's first prompt is in the tree.

        Other requests can use those nodes until the tree evicts them. Returns False if the tree
        has no prefix of that length.
        """
        if slot.kv.cache_protected_len <= begin:
            return True
        key = RadixKey(req.origin_input_ids, req.extra_key, limit=begin, cache_salt=req.cache_salt)
        cache = self._sessions.cache
        match = cache.tree_core.match_prefix(MatchPrefixParams(key=key, req=None))
        cache._apply_cache_actions(match.cache_actions)
        if match.device_prefix_len != begin:
            log.warning("sink_not_in_tree session=%s", req.session and req.session.session_id)
            return False
        lock = cache.lock(match.last_device_node)
        cache.unlock(slot.lock)
        slot.lock = lock
        return True


# --- rows of KV slots, and their batch ---


def compact_row(
    cache: BasePrefixCache, kv: ReqKvInfo, compaction: Compaction, own_from: int
) -> None:
    """Remove the compacted tokens' slots from a request's row.

    Args:
        own_from: first token of the compacted span whose slot belongs to the request, and is freed.
    """
    row = cache.req_to_token_pool.req_to_token[kv.req_pool_idx]
    page_size = cache.page_size
    cache.free_kv_row(kv, [(own_from, compaction.end)])
    # Pages stay whole, so the last one is moved up to its end.
    end = -(-kv.kv_allocated_len // page_size) * page_size
    moved = row[compaction.end : end].clone()
    row[compaction.begin : compaction.begin + len(moved)] = moved
    kv.kv_committed_len -= compaction.n_tokens
    kv.kv_allocated_len -= compaction.n_tokens


def shorten(batch: ScheduleBatch, index: int, n_tokens: int) -> None:
    """Subtract n_tokens from the length of a batch's request, in new tensors: with overlap the
    step in flight still reads the old ones.
    """
    less = torch.zeros_like(batch.seq_lens_cpu)
    less[index] = n_tokens
    batch.seq_lens_cpu = batch.seq_lens_cpu - less
    less = copy_to(less, batch.seq_lens.device)
    batch.seq_lens = batch.seq_lens - less.to(batch.seq_lens.dtype)
    batch.orig_seq_lens = batch.orig_seq_lens - less.to(batch.orig_seq_lens.dtype)
    batch.seq_lens_sum = None


# --- token arrays of a session, which its last finished request keeps for the next ---


def outputs_of(req: Req) -> "array[int]":
    outputs: array[int] = req.output_ids[: req.sampling_params.max_new_tokens]
    return outputs


def length_of(session: Session, req: Req) -> int:
    """Tokens of a session whose last finished request is `req`."""
    # An aborted request may have left its tokens in the same array.
    n_inputs: int = session.committed_origin_len
    return n_inputs + len(outputs_of(req))


def fold_outputs(session: Session, req: Req) -> None:
    """Make the finished request's output part of its input, as its successor would.

    All of it has been sent: a finished request's outputs are not read again.
    """
    outputs = outputs_of(req)
    ids = req.origin_input_ids
    unpadded = req.origin_input_ids_unpadded
    # An aborted request may have left its tokens here.
    del ids[session.committed_origin_len :]
    ids.extend(outputs)
    if unpadded is not ids:
        del unpadded[session.committed_unpadded_len :]
        unpadded.extend(outputs)
    req.output_ids = req.output_ids[:0]


def remove_tokens(req: Req, compaction: Compaction) -> None:
    """Remove the compacted tokens from the request's input arrays."""
    ids = req.origin_input_ids
    unpadded = req.origin_input_ids_unpadded
    if unpadded is not ids:
        # Some models have one placeholder here for all tokens of an item.
        if len(unpadded) == len(ids):
            del unpadded[compaction.begin : compaction.end]
        else:
            req.origin_input_ids_unpadded = ids
    del ids[compaction.begin : compaction.end]
    # SGLang rebuilds it on use.
    req.full_untruncated_fill_ids = array("q")


def confirm_lengths(session: Session, req: Req) -> None:
    """Record the lengths to which the session returns when a later request is aborted."""
    session.committed_origin_len = len(req.origin_input_ids)
    session.committed_unpadded_len = len(req.origin_input_ids_unpadded)
    session.committed_fill_len = 0


# --- positions ---


class Rebase:
    """Moves the keys of a session's window to earlier positions before positions run out.

    Compaction leaves unused positions behind the sink. A rebase closes that gap: the window's keys
    are rotated to the positions right behind the sink, and the table of positions follows.
    Distances within the window stay; those to the sink become the distances of a shorter
    conversation. Source: StreamingLLM, arXiv 2309.17453, which always assigns such positions.
    A model without M-RoPE has no table: the position of a token is its place among those that are
    left, so each compaction is followed by a rebase.

    Args:
        model: whose layers share one rotary embedding.
        kv: SGLang's pool of one device.
        limit: positions that the model was made for.
        has_table: whether requests have a table of positions.
    Raises:
        ValueError: the model's keys cannot be rotated in place.
    """

    def __init__(self, model: nn.Module, kv: Any, limit: int, *, has_table: bool):
        self.has_table = has_table
        ropes = _rotary_embeddings(model)
        if not ropes or not hasattr(ropes[0], "base"):
            raise ValueError("endless sessions need a rotary embedding with a base")
        scales = ("k_scale_buffer", "native_k_scale_buffer")
        if any(getattr(kv, name, None) is not None for name in scales):
            # Their pools return copies of the keys, or keys without their scale.
            raise ValueError(
                "endless sessions rotate keys in place, which KV in FP4 or MXFP8 does not allow: "
                "set kv_cache_dtype to fp8_e4m3 or bf16, or leave out the policy retention"
            )
        self._rope = ropes[0]
        self._kv = kv
        self._limit = limit
        self._reserve = min(REBASE_RESERVE_TOKENS, limit // 4)
        self._inv_freq = self._rope._compute_inv_freq(self._rope.base).float()
        if any(not _turns_by(rope, self._inv_freq) for rope in ropes):
            raise ValueError(
                "endless sessions rotate keys, which was not tried with the rotary embedding of "
                "this model: leave out the policy retention"
            )

    def due(self, mm_inputs: MultimodalInputs, sink_tokens: int) -> bool:
        gap = position_gap(mm_inputs, sink_tokens)
        n_taken = int(mm_inputs.mrope_positions.max()) + 1 - gap
        return rebase_due(gap, n_taken, self._limit, self._reserve)

    def rotate(self, rows: Tensor, gap: int) -> None:
        """Rotate keys in place to positions that are smaller by `gap`.

        Args:
            rows: [n] KV slots of all tokens behind the sink.
        """
        rope = self._rope
        kv = self._kv
        if self._inv_freq.device != rows.device:
            self._inv_freq = copy_to(self._inv_freq, rows.device)
        for layer in range(kv.start_layer, kv.start_layer + kv.layer_num):
            rebase_keys(
                kv.get_key_buffer(layer),
                rows.long(),
                gap,
                self._inv_freq,
                neox=rope.is_neox_style,
                rotary_dim=rope.rotary_dim,
            )


def _rotary_embeddings(model: nn.Module) -> list[Any]:
    """Those of the layers with KV. Encoders, of images for example, have others."""
    layers = (m for m in model.modules() if _has_kv(m))
    found = (getattr(layer, "rotary_emb", None) for layer in layers)
    return [rope for rope in found if hasattr(rope, "cos_sin_cache")]


def _has_kv(module: nn.Module) -> bool:
    return any(isinstance(child, RadixAttention) for child in module.children())


def _turns_by(rope: Any, inv_freq: Tensor) -> bool:
    """Whether a key's turn from one position to the next is that of these frequencies.

    Embeddings that are scaled have others (YaRN), or arguments of another meaning.
    """
    cos, sin = rope.cos_sin_cache[1].float().cpu().chunk(2)
    found = torch.atan2(sin, cos)
    expected = inv_freq.cpu()
    # The table may be in bfloat16.
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0.02, atol=1e-7)
