"""Signs of life of a turn whose prompt is prefilled, or waits behind others that are.

In: the engine's count of prefilled tokens, which SGLang publishes with every prefill batch,
whatever the policies. Out: PrefillStarted messages. A turn behind a full pool, where nothing is
prefilled, gives no sign and fails by the orchestrator's limit.
"""

import asyncio
from collections.abc import Callable

from sglang_live.messages import PrefillStarted
from sglang_live.stages.transport.server import ServedJob

SIGN_EVERY_S = 5.0
# Others may be prefilled past a turn that is stuck: longer than this no turn waits for its own.
LONGEST_PREFILL_S = 600.0


async def show_prefill(
    job: ServedJob, prefill_tokens: Callable[[], tuple[int, int]], writes: Callable[[], bool]
) -> None:
    """Until cancelled, or the reply is written. prefill_tokens: computed so far, and left."""
    computed, left = prefill_tokens()
    for _ in range(round(LONGEST_PREFILL_S / SIGN_EVERY_S)):
        await asyncio.sleep(SIGN_EVERY_S)
        if writes():
            return
        now_computed, now_left = prefill_tokens()
        if now_computed > computed or now_left < left:
            job.post(PrefillStarted(job.job_id))
        computed, left = now_computed, now_left
