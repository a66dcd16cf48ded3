"""When memory is short, requests that have time are retracted, and continue unchanged."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from test.engine.conftest import running_stages
from test.engine.gauges import total, until
from test.engine.turns import greedy_turn, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

N_FRAMES = 65
# Room for one whole response, or for three that are paused at their beginning.
POOL_TOKENS = 92


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cramped(endless_checkpoint, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cramped")
    args = {"max_total_tokens": POOL_TOKENS, "max_running_requests": 8}
    policies = ("urgency", "pacing", "truncate")
    # Without it, SGLang reserves room for 4096 tokens per response, and admits one at a time.
    estimate = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
    stages = running_stages(endless_checkpoint, cache, args, estimate, policies=policies)
    async with stages as running:
        yield running


async def codes(
    links,
    turn,
    listening: asyncio.Event | None = None,
    n_frames: int = N_FRAMES,
) -> np.ndarray:
    """The response's codes. Its listener plays nothing until `listening`, then all."""
    frames: list[np.ndarray] = []
    async with links.talker.open(turn) as speech:
        await speech.write(list(range(20, 20 + N_FRAMES + 10)), "a")
        hearing = asyncio.create_task(_listen(speech, listening))
        try:
            async with aclosing(speech.frames()) as chunks:
                async for some in chunks:
                    frames.extend(np.frombuffer(some, "<i2").reshape(-1, 16))
                    if len(frames) >= n_frames:
                        break
        finally:
            hearing.cancel()
    return np.stack(frames[:n_frames])


async def _listen(speech, listening: asyncio.Event | None) -> None:
    while listening is not None and not listening.is_set():
        speech.report(0.0, False)
        await asyncio.sleep(0.02)
    while True:
        speech.report(1000.0, False)
        await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def jobs(cramped):
    """Four sessions with a turn each."""
    jobs = []
    for n in range(4):
        turn = greedy_turn(user(f"tell me {n}"), system="", n_tokens=4)
        links = cramped.links(f"cramped-{n}")
        await think(links, turn)
        jobs.append((links, replace(turn, temperature=None, seed=70 + n)))
    yield jobs
    for links, _ in jobs:
        links.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(jobs):
    """Their codes, one after the other."""
    return [await codes(*job) for job in jobs]


async def test_paused_streams_are_retracted_and_continue_with_equal_codes(cramped, jobs, expected):
    heard = asyncio.Event()
    waiting = [asyncio.create_task(codes(*job, heard)) for job in jobs[:3]]
    async with asyncio.timeout(60):
        await until(cramped, "talker", "policy_paused_now", lambda n: n == 3)
        first = await codes(*jobs[3], n_frames=1)  # there is no room for it without a retraction
        np.testing.assert_array_equal(first, expected[3][:1])
        await until(cramped, "talker", "policy_paused_retracted", lambda n: n > 0)
        n_retracted = await total(cramped, "talker", "policy_retracted")
        running = await codes(*jobs[3])
        np.testing.assert_array_equal(running, expected[3])
        # The one that was retracted may be running again.
        await until(cramped, "talker", "policy_retracted", lambda n: n > n_retracted)
        heard.set()
        for got, wanted in zip(await asyncio.gather(*waiting), expected[:3], strict=True):
            np.testing.assert_array_equal(got, wanted)
    await until(cramped, "talker", "requests_running", lambda n: n == 0)
