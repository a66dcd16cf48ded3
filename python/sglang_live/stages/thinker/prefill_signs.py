"""What a thinker sends while a turn's prompt is prefilled."""

import asyncio
from collections.abc import Callable

from sglang_live.messages import PrefillStarted
from sglang_live.stages.transport.server import ServedJob

SIGN_EVERY_S = 5.0
# Other prompts may be prefilled before a turn that is stuck: no turn's prefill takes longer.
LONGEST_PREFILL_S = 600.0


async def show_prefill(
    job: ServedJob, prefill_tokens: Callable[[], tuple[int, int]], writes: Callable[[], bool]
) -> None:
    """Send PrefillStarted until cancelled, or until the response has begun.

    Behind a full KV pool nothing is prefilled and nothing is sent: the turn fails by the
    orchestrator's limit.

    Args:
        prefill_tokens: tokens of prompts computed so far, and left to compute.
        writes: whether the response has begun.
    """
    computed, left = prefill_tokens()
    for _ in range(round(LONGEST_PREFILL_S / SIGN_EVERY_S)):
        await asyncio.sleep(SIGN_EVERY_S)
        if writes():
            return
        now_computed, now_left = prefill_tokens()
        if now_computed > computed or now_left < left:
            job.post(PrefillStarted(job.job_id))
        computed, left = now_computed, now_left
