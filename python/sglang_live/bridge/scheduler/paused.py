"""Paused requests, and their return into a decode batch.

A paused request keeps its row, KV and tree lock. Resuming rebuilds a decode batch from the
requests, as upstream does for hisparse, and merges it into the running one.
Penalties are state of the batch, not of the request, so a paused request stores its rows of them,
and what a retracted one has written is counted again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_live.engine_channel.inbox import CONTINUED
from sglang_live.models.host_copy import copy_to


class ReqsView:
    """The part of a batch's interface that SGLang's observers use, over any list of requests."""

    __slots__ = ("reqs",)

    def __init__(self, reqs: list[Req]):
        self.reqs = reqs

    def is_empty(self) -> bool:
        return not self.reqs


@dataclass(slots=True)
class PausedRequest:
    """A paused request.

    Attributes:
        penalties: by penalizer class, this request's row of each tensor; empty without penalties.
    """

    req: Req
    penalties: dict[type, dict[str, torch.Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(batch: ScheduleBatch, index: int) -> "PausedRequest":
        """Create the record; to be called before the batch is filtered."""
        paused = PausedRequest(batch.reqs[index])
        orchestrator = batch.sampling_info.penalizer_orchestrator
        if orchestrator.is_required:
            for kind, penalizer in orchestrator.penalizers.items():
                if penalizer.is_prepared():
                    paused.penalties[kind] = {
                        name: value[index : index + 1].clone()
                        for name, value in vars(penalizer).items()
                        if isinstance(value, torch.Tensor)
                    }
        return paused

    @property
    def step_in_flight(self) -> bool:
        """Whether the result of its last step is outstanding, which overlap makes possible."""
        req = self.req
        n_launched: int = req.kv.kv_committed_len
        return len(req.origin_input_ids) + len(req.output_ids) - 1 != n_launched


def decode_batch_of(scheduler: Any, returning: list[PausedRequest]) -> ScheduleBatch:
    """A batch of paused requests that is ready to decode."""
    reqs = [paused.req for paused in returning]
    batch = ScheduleBatch.init_new(
        reqs=reqs,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        model_config=scheduler.model_config,
        enable_overlap=scheduler.enable_overlap,
        spec_algorithm=scheduler.spec_algorithm,
    )
    device = torch.device(scheduler.device)
    for paused in returning:
        if paused.step_in_flight:
            raise AssertionError(f"paused {paused.req.rid}: its last step is still in flight")
    batch.req_pool_indices_cpu = torch.tensor([r.kv.req_pool_idx for r in reqs], dtype=torch.int64)
    batch.req_pool_indices = copy_to(batch.req_pool_indices_cpu, device)
    batch.seq_lens_cpu = torch.tensor([r.kv.kv_committed_len for r in reqs], dtype=torch.int64)
    batch.seq_lens = copy_to(batch.seq_lens_cpu, device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = None
    # merge_batch concatenates this list for models with 3-D rotary positions.
    batch.multimodal_inputs = [req.multimodal_inputs for req in reqs]
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
    # The newest token is in the relay since its step, at the row that a paused request keeps.
    batch.input_ids = None
    vocab_size = scheduler.model_config.vocab_size
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
    if batch.sampling_info.penalizer_orchestrator.is_required:
        _restore_penalties(batch, returning)
    return batch


def _restore_penalties(batch: ScheduleBatch, returning: list[PausedRequest]) -> None:
    orchestrator = batch.sampling_info.penalizer_orchestrator
    for index, paused in enumerate(returning):
        for kind, rows in paused.penalties.items():
            penalizer = orchestrator.penalizers[kind]
            penalizer.prepare()
            for name, row in rows.items():
                getattr(penalizer, name)[index] = row[0]


def cumulate_one_behind(cumulate: Callable[[ScheduleBatch], None], batch: ScheduleBatch) -> None:
    """Around ScheduleBatch.cumulate_penalty_output_tokens.

    With overlap SGLang counts the newest known token: usually the one before the step in flight,
    but the last one when no step is in flight, which depends on the other requests. This function
    always counts the one before, so pausing does not change a request's output.
    """
    if not batch.enable_overlap:
        cumulate(batch)
        return
    known = [(req, req.output_ids) for req in batch.reqs]
    for req, ids in known:
        # The KV beyond the prompt has one entry per launched step.
        req.output_ids = ids[: req.kv.kv_committed_len - len(req.origin_input_ids)]
    try:
        cumulate(batch)
    finally:
        for req, ids in known:
            req.output_ids = ids


def count_written(
    info: SamplingBatchInfo, _kind: type, batch: ScheduleBatch, *_args: Any
) -> SamplingBatchInfo:
    """After SamplingBatchInfo.from_schedule_batch: count what retracted requests have written, and
    what another engine has written of a response that goes on in this one.

    With overlap the token before the next one is counted later (cumulate_one_behind).
    """
    if batch.forward_mode is None or not batch.forward_mode.is_extend():
        return info
    penalizers = info.penalizer_orchestrator.penalizers
    prepared = {kind: one for kind, one in penalizers.items() if one.is_prepared()}
    if not prepared:
        return info
    device = torch.device(batch.device)
    for row, req in enumerate(batch.reqs):
        written = list(req.output_ids[:-1] if batch.enable_overlap else req.output_ids)
        n_before = (req.sampling_params.custom_params or {}).get(CONTINUED, 0)
        ids = [*(req.origin_input_ids[-n_before:] if n_before else ()), *written]
        if ids:
            counted = copy_to(torch.tensor(ids, dtype=torch.int64), device)
            for kind, penalizer in prepared.items():
                # The fewest tokens are those of this request.
                is_length = kind is BatchedMinNewTokensPenalizer
                _count(kind, penalizer, row, counted[n_before:] if is_length else counted)
    return info


def _count(kind: type, penalizer: Any, row: int, ids: torch.Tensor) -> None:
    """ids: int64 [n], tokens that the request in this row of the batch has written."""
    if kind is BatchedFrequencyPenalizer:
        penalty = penalizer.frequency_penalties[row].expand(len(ids))
        penalizer.cumulated_frequency_penalties[row].scatter_add_(0, ids, penalty)
    elif kind is BatchedPresencePenalizer:
        penalty = penalizer.presence_penalties[row].expand(len(ids))
        penalizer.cumulated_presence_penalties[row].scatter_(0, ids, penalty)
    elif kind is BatchedRepetitionPenalizer:
        penalty = penalizer.repetition_penalties[row].expand(len(ids))
        penalizer.cumulated_repetition_penalties[row].scatter_(0, ids, penalty)
    elif kind is BatchedMinNewTokensPenalizer:
        penalizer.len_output_tokens[row] = len(ids)
    else:
        raise NotImplementedError(f"penalizer {kind.__name__}")
