"""Responses of the talker that lends: their first frames, gaps and codes."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from benchmark.lending.stages import Links, Pair
from sglang_live.core import HistoryItem, TextPart, TurnRequest
from sglang_live.orchestrator.stage_jobs import seed_of

_TEXT_IDS = list(range(20, 120))
_N_FRAMES = 50
# Pauses between the responses of one session.
_PAUSE_S = 2.0


def _request() -> TurnRequest:
    history = (HistoryItem(key="user-1", role="user", parts=(TextPart("hi"),)),)
    return TurnRequest(
        turn_id="speaks",
        instructions="s",
        history=history,
        voice="ethan",
        max_output_tokens=8,
        temperature=0.0,
    )


class Speakers:
    def __init__(self, pair: Pair):
        self._pair, self._turn = pair, _request()
        self._numbers = itertools.count()
        self._codes: np.ndarray | None = None
        self._ttfp_ms: list[float] = []
        self._gaps_ms: list[float] = []
        self._n_wrong = 0

    async def learn(self) -> None:
        """Speak alone, and remember the codes."""
        links = await self._links("alone")
        self._codes, _, _ = await self._speak(links)
        links.close()

    @contextlib.asynccontextmanager
    async def speaking(self, n: int) -> AsyncIterator[None]:
        """A context in which n sessions speak again and again."""
        over = asyncio.Event()
        tasks = [asyncio.create_task(self._go_on(number, over)) for number in range(n)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)

    async def _go_on(self, number: int, over: asyncio.Event) -> None:
        rng, links = random.Random(number), await self._links(f"speaker-{number}")
        while not over.is_set():
            codes, ttfp_s, gaps_s = await self._speak(links)
            self._ttfp_ms.append(1000 * ttfp_s)
            self._gaps_ms += [1000 * gap_s for gap_s in gaps_s]
            self._n_wrong += not np.array_equal(codes, self._codes)
            await asyncio.sleep(rng.uniform(0, 2 * _PAUSE_S))
        links.close()

    async def _links(self, session_id: str) -> Links:
        links = self._pair.links(session_id)
        # A job's id is its turn's: of two jobs with one id, a stage serves the later alone.
        turn = replace(self._turn, turn_id=f"{session_id}-thinks")
        async with links.thinker.open(turn) as thought:
            async for _ in thought.tokens():
                pass
        return links

    async def _speak(self, links: Links) -> tuple[np.ndarray, float, list[float]]:
        """Codes of a response, the time to its first frame, and between its chunks."""
        turn_id = f"speaks-{next(self._numbers)}"
        turn = replace(self._turn, turn_id=turn_id, seed=seed_of(self._turn))
        frames: list[np.ndarray] = []
        async with links.talker.open(turn) as speech:
            asked_s, times_s = time.monotonic(), []
            await speech.write(_TEXT_IDS, "a")
            await speech.end_text()
            async with aclosing(speech.frames()) as chunks:
                async for codes in chunks:
                    times_s.append(time.monotonic())
                    frames.extend(np.frombuffer(codes, "<i2").reshape(-1, 16))
                    if len(frames) >= _N_FRAMES:
                        break
        gaps_s = np.diff(times_s).tolist()
        return np.stack(frames[:_N_FRAMES]), times_s[0] - asked_s, gaps_s

    def result(self) -> dict[str, Any]:
        ttfp, gaps = np.array(self._ttfp_ms or [np.nan]), np.array(self._gaps_ms or [np.nan])
        return {
            "n": len(self._ttfp_ms),
            "wrong": self._n_wrong,
            "ttfp_ms_p50": float(np.percentile(ttfp, 50)),
            "ttfp_ms_p90": float(np.percentile(ttfp, 90)),
            "gap_ms_p50": float(np.percentile(gaps, 50)),
            "gap_ms_p99": float(np.percentile(gaps, 99)),
            "gap_ms_max": float(gaps.max()),
        }
