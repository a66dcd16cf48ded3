"""The engine of a talker that SGLang serves by itself (stages/talker/piece_stage.py)."""

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_live.bridge.scheduler.paused import count_written
from sglang_live.models.host_copy import copy_to


def sample_alone(
    info: SamplingBatchInfo, _kind: type, batch: ScheduleBatch, *_args: Any
) -> SamplingBatchInfo:
    """After SamplingBatchInfo.from_schedule_batch: make sampling independent of the batch.

    SGLang takes seeds in its mode for deterministic inference only, which excludes most of its
    kernels. SGLang has one hook for each function, so penalties are counted here, too.
    """
    device = torch.device(batch.device)
    seeds = [req.sampling_params.sampling_seed or 0 for req in batch.reqs]
    info.sampling_seed = copy_to(torch.tensor(seeds, dtype=torch.int64), device)
    return count_written(info, _kind, batch)
