"""Batches of an engine on a modelled device: a result exists when its modelled time has passed.

The real model computes underneath, in the same call as always. What SGLang waits for, the event
`copy_done` of a result, is one of the modelled device. So the scheduler's Python overlaps with the
modelled time as it overlaps with a GPU's: with overlap SGLang waits for a batch after it has
launched the next one.
"""

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch

from lab.modelled_device.device import modelled_device
from sglang_live.bridge.scheduler.batch_times import encoded_audio_s
from sglang_live.extensions.planner.device_model.costs import EngineCosts


def run_batch_on_clock(
    run: Callable[..., Any], scheduler: Any, batch: ScheduleBatch, *args: Any, **kwargs: Any
) -> Any:
    """Around Scheduler.run_batch."""
    launched_s = time.monotonic()
    device = modelled_device()
    cost_s = batch_cost_s(batch, device.engine_costs)
    if cost_s is None:
        return run(scheduler, batch, *args, **kwargs)
    event = device.compute(cost_s, launched_s)
    began_s = time.monotonic()
    result = run(scheduler, batch, *args, **kwargs)
    device.clock.count_computation(time.monotonic() - began_s)
    result.copy_done = event
    for observe in device.observers:
        observe(event.work)
    return result


def batch_cost_s(batch: ScheduleBatch, costs: EngineCosts) -> float | None:
    """Seconds of a batch; None if it computes nothing."""
    if batch.forward_mode.is_decode():
        return costs.decode_s(len(batch.reqs), int(batch.seq_lens_cpu.sum()))
    if batch.forward_mode.is_extend():
        return costs.prefill_s(batch.extend_num_tokens, encoded_audio_s(batch))
    return None
