"""Sessions of a thinker that do random things, with tokens that a reference checks."""

import asyncio
import random

from sglang_live.messages import TruncateSession, UserSpeaking
from test.engine.gauges import load_of, until
from test.engine.small_pool import Pool, check


class Talk:
    """Sessions that take turns one after the other, with tokens known to a reference."""

    def __init__(self, pool: Pool, prefix: str, n_sessions: int, seed: int):
        self._pool, self.rng = pool, random.Random(seed)
        self.names = [f"{prefix}-{n}" for n in range(n_sessions)]
        self.heard: dict[str, list[int]] = {name: [] for name in self.names}
        self.said: dict[str, list[tuple[int, float]]] = {name: [] for name in self.names}

    async def begin(self) -> None:
        for name in self.names:
            await self._pool.open(name)
            await self.turn(name)

    async def turn(self, name: str) -> None:
        rng = self.rng
        new = [rng.randrange(10, 200) for _ in range(rng.randrange(15, 60))]
        response = await self._pool.say(name, new, rng.randrange(2, 20))
        self.heard[name] += new
        for token, logprob in response:
            self.said[name].append((len(self.heard[name]), logprob))
            self.heard[name].append(token)

    async def _truncate(self, name: str, kept: int) -> None:
        """Wait for its end: it is sent on another socket than the next request."""
        stages = self._pool.stages
        before = (await load_of(stages, "thinker"))["policy_truncated"]
        self._pool.feed.send(TruncateSession(name, kept))
        await until(stages, "thinker", "policy_truncated", lambda n: n > before)

    async def step(self, reference) -> None:
        """A random event of a random session."""
        rng, name = self.rng, self.rng.choice(self.names)
        heard, said = self.heard[name], self.said[name]
        if rng.random() < 0.15 and said:
            kept = rng.randrange(said[0][0], len(heard))  # the newest token is computed again
            del heard[kept:]
            self.said[name] = [(at, logprob) for at, logprob in said if at < kept]
            await self._truncate(name, kept)
        if len(heard) > 180:
            await self.close(name, reference)
            await self._pool.open(name)
        if rng.random() < 0.5:
            self._pool.feed.send(UserSpeaking(name))
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.05, 0.2)))
        await self.turn(name)

    async def close(self, name: str, reference) -> None:
        check(reference, self.heard[name], self.said[name])
        await self._pool.close(name)
        self.heard[name], self.said[name] = [], []

    async def end(self, reference) -> None:
        for name in self.names:
            await self.close(name, reference)
