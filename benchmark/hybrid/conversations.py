"""Sessions of a running thinker that hold a conversation's KV, for turns one after the other."""

import asyncio
import itertools

import aiohttp
import numpy as np

from benchmark.hybrid.listeners import TPOT_S
from benchmark.hybrid.workload import Work

# Of users beyond those that speak at the same time if every response is played as it is made.
_SPARE = 1.2
_SPOKEN_FIRST_S = 1.0
TOKENS = (10, 200)  # ids of text


def at_once(turns: list[Work]) -> int:
    """The most responses that play at the same time."""
    begins = [(turn.arrives_s, 1) for turn in turns]
    ends = [(t.arrives_s + _SPOKEN_FIRST_S + t.output_tokens * TPOT_S, -1) for t in turns]
    return max(itertools.accumulate(step for _, step in sorted([*begins, *ends])), default=0)


class Conversations:
    """
    Args:
        divisor: tokens of a conversation for which one token is sent.
    """

    def __init__(self, http: aiohttp.ClientSession, divisor: int, rng: np.random.Generator):
        self._http, self._divisor, self._rng = http, divisor, rng
        self._names: list[str] = []
        self._free: dict[str, int] = {}  # tokens by name

    async def open(self, turns: list[Work]) -> None:
        """As many as the turns need, with lengths of theirs."""
        n = min(len(turns), round(_SPARE * at_once(turns)))
        lengths = [max(1, turn.cached_tokens // self._divisor) for turn in turns[:n]]
        await asyncio.gather(*(self._open(f"talk-{i}", n) for i, n in enumerate(lengths)))

    async def take(self, turn: Work) -> str:
        """The free session whose conversation is most nearly as long as the turn's. Waits for one:
        a user speaks again when the response before has been made."""
        while not self._free:
            await asyncio.sleep(0.02)
        wanted = turn.cached_tokens // self._divisor
        name = min(self._free, key=lambda one: abs(self._free[one] - wanted))
        del self._free[name]
        return name

    def release(self, name: str, turn: Work) -> None:
        self._free[name] = turn.cached_tokens // self._divisor

    async def close(self) -> None:
        for name in self._names:
            await self._post("/close_session", {"session_id": name})

    async def _open(self, name: str, n_tokens: int) -> None:
        self._names.append(name)
        capacity = {"capacity_of_str_len": 1 << 40, "streaming": True}
        await self._post("/open_session", {"session_id": name, **capacity})
        body = {
            "input_ids": self._rng.integers(*TOKENS, n_tokens).tolist(),
            "session_params": {"id": name},
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        }
        await self._post("/generate", body)
        self._free[name] = n_tokens

    async def _post(self, path: str, body: dict[str, object]) -> None:
        async with self._http.post(path, json=body) as response:
            response.raise_for_status()
