"""The thinker's KV over one run, from the server's /metrics."""

import asyncio
from collections.abc import Callable

from benchmark.load.stage_load import PING_S, stage_loads

_PERIOD_S = 1.0


class KvUse:
    """Counters of the thinker between `begin` and `end`, and the most KV that it held.

    read: returns the text of /metrics.

    Attributes:
        most_tokens: KV of running requests and of sessions between two turns, the most at one time.
    """

    def __init__(self, read: Callable[[], str]):
        self._read = read
        self._before: dict[str, float] = {}
        self.most_tokens = 0

    def begin(self) -> None:
        self._before = self._thinker()

    async def keep_sampling(self) -> None:
        while True:
            self._sample(await asyncio.to_thread(self._thinker))
            await asyncio.sleep(_PERIOD_S)

    async def end(self) -> dict[str, float]:
        """By how much each value that the thinker's policies report has grown."""
        # The values are as old as the last ping.
        await asyncio.sleep(PING_S)
        after = await asyncio.to_thread(self._thinker)
        self._sample(after)
        return {
            name.removeprefix("policy_"): value - self._before.get(name, 0.0)
            for name, value in after.items()
            if name.startswith("policy_")
        }

    def _sample(self, load: dict[str, float]) -> None:
        held = load.get("kv_tokens_used", 0.0) + load.get("policy_tokens_idle", 0.0)
        self.most_tokens = max(self.most_tokens, round(held))

    def _thinker(self) -> dict[str, float]:
        return stage_loads(self._read()).get("thinker", {})
