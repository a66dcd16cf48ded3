"""The engine of a talker that SGLang serves by itself (stages/talker/piece_stage.py)."""

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_live.bridge.scheduler.live import LiveScheduler
from sglang_live.models.host_copy import copy_to
from sglang_live.policy.config import TALKER


class PieceTalkerScheduler(LiveScheduler):
    policy_config = TALKER


def sample_alone(
    info: SamplingBatchInfo, _kind: type, batch: ScheduleBatch, *_args: Any
) -> SamplingBatchInfo:
    """After SamplingBatchInfo.from_schedule_batch: make sampling independent of the batch.

    SGLang takes seeds in its mode for deterministic inference only, which excludes most of its
    kernels. A batch of prompts begins without penalties, also those of a retracted request for
    what it has written before.
    """
    device = torch.device(batch.device)
    seeds = [req.sampling_params.sampling_seed or 0 for req in batch.reqs]
    info.sampling_seed = copy_to(torch.tensor(seeds, dtype=torch.int64), device)
    penalizer = info.penalizer_orchestrator.penalizers.get(BatchedRepetitionPenalizer)
    if penalizer is not None and penalizer.is_prepared():
        penalties = penalizer.cumulated_repetition_penalties
        for row, req in enumerate(batch.reqs):
            if req.output_ids:
                written = copy_to(torch.tensor(list(req.output_ids)), device)
                penalties[row].index_fill_(0, written, req.sampling_params.repetition_penalty)
    return info
