"""Responses of a talker, with codes that are compared with those of a response alone."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import numpy as np

from sglang_live.orchestrator.stage_jobs import seed_of
from test.engine.conftest import Stages
from test.engine.turns import greedy_turn, speak, think, user

N_FRAMES = 25


class Speech:
    """Responses of the talker, at random times, one at a time for each speaker.

    codes: of a response alone. n_wrong: of responses with other codes.
    """

    def __init__(self, stages: Stages):
        self._stages, self.codes, self.n_spoken, self.n_wrong = stages, None, 0, 0
        turn = greedy_turn(user("hi"), system="s", n_tokens=8)
        self._turn = replace(turn, seed=seed_of(turn))

    @contextlib.asynccontextmanager
    async def speaker(self, name: str) -> AsyncIterator[Callable[[], Awaitable[np.ndarray]]]:
        """A session whose context the talker has; the block is given its response."""
        links, count = self._stages.links(name), itertools.count()
        # A job's id is its turn's: of two jobs with one id, a stage answers the later alone.
        await asyncio.wait_for(think(links, replace(self._turn, turn_id=f"{name}-thinks")), 60)

        async def say() -> np.ndarray:
            turn = replace(self._turn, turn_id=f"{name}-says-{next(count)}")
            return await asyncio.wait_for(speak(links, turn, list(range(20, 100)), N_FRAMES), 60)

        try:
            yield say
        finally:
            links.close()

    async def learn(self) -> None:
        async with self.speaker("alone") as say:
            self.codes = await say()

    def check(self, codes: np.ndarray) -> None:
        self.n_spoken += 1
        self.n_wrong += not np.array_equal(codes, self.codes)

    async def _speak(self, n: int, over: asyncio.Event) -> None:
        rng = random.Random(n)
        async with self.speaker(f"speaker-{n}") as say:
            while not over.is_set():
                await asyncio.sleep(rng.random())
                self.check(await say())

    @contextlib.asynccontextmanager
    async def going_on(self, n_speakers: int = 2) -> AsyncIterator[None]:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as speakers:
            for n in range(n_speakers):
                speakers.create_task(self._speak(n, over))
            try:
                yield
            finally:
                over.set()
