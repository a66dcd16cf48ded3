"""Whole pages leave the middle of a request's row of KV slots, and its batch is told."""

import os

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

from sglang_live.kv.retention import Compaction

# For tests: what has left a row is overwritten, so that nobody can read it unnoticed.
POISON_ENV = "SGLANG_LIVE_POISON_FREED_KV"
_POISON = bool(os.environ.get(POISON_ENV))


def compact_row(cache: BasePrefixCache, kv: ReqKvInfo, cut: Compaction, own_from: int) -> None:
    """own_from: from here to the cut's end the slots are the request's own, and given back."""
    row = cache.req_to_token_pool.req_to_token[kv.req_pool_idx]
    page_size = cache.page_size
    if _POISON:
        _overwrite(cache.token_to_kv_pool_allocator.get_kvcache(), row[own_from : cut.end])
    cache.free_kv_row(kv, [(own_from, cut.end)])
    # Whole pages, so the last one moves to its end.
    end = -(-kv.kv_allocated_len // page_size) * page_size
    row[cut.begin : cut.begin + end - cut.end] = row[cut.end : end].clone()
    kv.kv_committed_len -= cut.n_tokens
    kv.kv_allocated_len -= cut.n_tokens


def shorten(batch: ScheduleBatch, index: int, n_tokens: int) -> None:
    """New tensors and lists: with overlap the step in flight still reads the old ones."""
    less = torch.zeros_like(batch.seq_lens_cpu)
    less[index] = n_tokens
    batch.seq_lens_cpu = batch.seq_lens_cpu - less
    less = less.to(batch.seq_lens.device, non_blocking=True)
    batch.seq_lens = batch.seq_lens - less.to(batch.seq_lens.dtype)
    batch.orig_seq_lens = batch.orig_seq_lens - less.to(batch.orig_seq_lens.dtype)
    batch.seq_lens_sum = None


def _overwrite(pool, slots: torch.Tensor) -> None:
    for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
        pool.get_key_buffer(layer)[slots.long()] = float("nan")
        pool.get_value_buffer(layer)[slots.long()] = float("nan")
