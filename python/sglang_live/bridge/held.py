"""Requests that sit out rounds with row and KV kept, and how they come back into a batch.

Leaving a decode batch frees nothing: request row, KV and tree lock stay. Coming back rebuilds a
one-request decode batch from the request, as upstream does for hisparse, and merges it.
"""

import torch
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class ReqsView:
    """What SGLang's observers need of a batch, over running and held requests."""

    __slots__ = ("reqs",)

    def __init__(self, reqs: list[Req]):
        self.reqs = reqs

    def is_empty(self) -> bool:
        return not self.reqs


def decode_batch_of(scheduler, req: Req) -> ScheduleBatch:
    """A decode-ready batch holding one request whose row and KV were kept."""
    batch = ScheduleBatch.init_new(
        reqs=[req],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        model_config=scheduler.model_config,
        enable_overlap=scheduler.enable_overlap,
        spec_algorithm=scheduler.spec_algorithm,
    )
    device = scheduler.device
    seq_len = len(req.origin_input_ids) + len(req.output_ids) - 1
    if req.kv.kv_committed_len != seq_len:
        raise AssertionError(
            f"held {req.rid}: {req.kv.kv_committed_len} committed, {seq_len} expected"
        )
    batch.req_pool_indices_cpu = torch.tensor([req.kv.req_pool_idx], dtype=torch.int64)
    batch.req_pool_indices = batch.req_pool_indices_cpu.to(device, non_blocking=True)
    batch.seq_lens_cpu = torch.tensor([seq_len], dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(device, non_blocking=True)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = None
    # merge_batch concatenates it for models with 3-D rotary positions.
    batch.multimodal_inputs = [req.multimodal_inputs]
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob]
    last = torch.tensor([req.output_ids[-1]], dtype=torch.int64, device=device)
    scheduler.future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=last))
    batch.input_ids = None  # gathered from the relay just stashed
    vocab_size = scheduler.model_config.vocab_size
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
    if batch.sampling_info.penalizer_orchestrator.is_required:
        # Fresh penalizers have no history. The talker counts repetitions itself, exactly.
        raise AssertionError(f"held {req.rid}: SGLang's penalties cannot be resumed")
    return batch
