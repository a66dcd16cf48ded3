"""Best effort beside what is heard: its output is that of a run alone, and it frees its memory.

Real engines with every policy. Best-effort requests are paused, requeued in the middle of their
prompts, retracted into the tree, aborted, and resumed, because responses with listeners come and
go beside them in a pool that is too small for all.
"""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from benchmark.native_client import native_client
from lab.attachment import joined
from lab.cpu_graphs.attach import environment as decode_graphs
from lab.poison import POISON
from sglang_live.ids import BATCH_PREFIX, THINK_PREFIX
from sglang_live.messages import HeardOfMany
from sglang_live.policy.policies import POLICIES
from test.engine.conftest import IS_NIGHTLY, running_stages
from test.engine.gauges import load_of, total, until, until_idle
from test.engine.small_pool import Pool
from test.engine.test_pauses import SAMPLING, speak_to
from test.engine.turns import greedy_turn, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

N_TOKENS, N_TOKENS_HEARD = 40, 30
N_BATCH, N_HEARD, N_GONE = (21, 12, 16) if IS_NIGHTLY else (15, 8, 10)
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 1.5}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[(1, True), (16, False)],
    ids=["graphs-host", "page-16-no-overlap-retractions"],
)
async def stages(request, endless_checkpoint, tmp_path_factory):
    page, overlap = request.param
    cache = tmp_path_factory.mktemp("hybrid")
    args = {
        "page_size": page,
        "disable_overlap_schedule": not overlap,
        "chunked_prefill_size": 64,
        "max_running_requests": 8,
        "max_total_tokens": 1600,
    }
    environment = decode_graphs((1, 2, 4)) if overlap else RETRACT
    running = running_stages(
        endless_checkpoint,
        cache,
        args,
        environment,
        joined(environment, POISON),
        policies=POLICIES,
        thinker_args=HOST if overlap else None,
        shares_device=True,
        names=("thinker", "talker"),
    )
    async with running as stages:
        yield stages


class Load:
    """Requests of the thinker, over SGLang's own API."""

    def __init__(self, stages, seed: int):
        self.pool, self._rng = Pool(stages), random.Random(seed)

    def spoken(self) -> list[tuple[list[int], dict]]:
        """Short prompts, and their sampling."""
        requests = []
        for at in range(N_HEARD):
            prompt = [self._rng.randrange(10, 200) for _ in range(self._rng.randrange(20, 90))]
            own = SAMPLING[at % len(SAMPLING)] | {"max_new_tokens": N_TOKENS_HEARD}
            own.pop("min_new_tokens", None)
            requests.append((prompt, own))
        return requests

    def batch(self) -> list[tuple[list[int], dict]]:
        """Prompts of up to seven chunks, some of which begin alike, and their sampling."""
        shared = [self._rng.randrange(10, 200) for _ in range(80)]
        requests = []
        for at in range(N_BATCH):
            n = self._rng.choice((5, 40, 130, 420))
            ids = [self._rng.randrange(10, 200) for _ in range(n)]
            prompt = [*shared, *ids[80:]] if at % 3 == 0 and n > 80 else ids
            sampling = {"max_new_tokens": N_TOKENS, **SAMPLING[at % len(SAMPLING)]}
            requests.append((prompt, sampling))
        return requests

    async def run(self, rid: str, prompt: list[int], sampling: dict) -> list[int]:
        body = {
            "rid": rid,
            "input_ids": prompt,
            "sampling_params": {**sampling, "ignore_eos": "min_new_tokens" not in sampling},
        }
        return (await self.pool.post("/generate", body, 120)).json()["output_ids"]

    async def heard(self, series: str, requests: list) -> list[list[int]]:
        """Responses that are heard as they are written, one after the other."""
        said = []
        for n, (prompt, sampling) in enumerate(requests):
            rid = f"{THINK_PREFIX}{series}-{n:06d}"
            playing = asyncio.create_task(self._play(rid))
            try:
                said.append(await self.run(rid, prompt, sampling))
            finally:
                playing.cancel()
            await asyncio.sleep(self._rng.choice((0.0, 0.05, 0.2)))
        return said

    async def _play(self, rid: str) -> None:
        heard_s = 0.0
        while True:
            await asyncio.sleep(0.05)
            self.pool.feed.send(HeardOfMany.of([rid], [heard_s], [True]))
            heard_s += 0.05

    async def gone(self, series: str) -> None:
        """Requests of both classes whose clients leave: in the queue, in a prompt, in a decode."""
        for n in range(N_GONE):
            prefix = self._rng.choice((BATCH_PREFIX, THINK_PREFIX))
            body = {
                "rid": f"{prefix}{series}-{n:04d}",
                "input_ids": [self._rng.randrange(10, 200) for _ in range(300)],
                "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
            }
            async with native_client(self.pool.spec, 180) as client:
                running = asyncio.create_task(client.post("/generate", json=body))
                await asyncio.sleep(self._rng.choice((0.0, 0.05, 0.2, 0.6)))
                async with asyncio.timeout(20):
                    while not running.done():  # an abort before its request has no effect
                        await client.post("/abort_request", json={"rid": body["rid"]})
                        await asyncio.wait([running], timeout=0.05)
                response = await running
            assert response.status_code in (200, 400)


async def be_totals(stages, stage: str) -> dict[str, float]:
    """Of best effort, once nothing of it is left."""
    for name in ("running", "paused", "waiting", "kv_tokens"):
        await until(stages, stage, f"policy_be_{name}", lambda n: n == 0)
    return await load_of(stages, stage)


async def test_both_classes_have_the_outputs_of_runs_alone(stages):
    """Also beside requests of both classes that are aborted at random."""
    load = Load(stages, 5)
    batch, first, second = load.batch(), load.spoken(), load.spoken()
    alone = [*batch, *first, *second]
    expected = [await load.run(f"alone-{n:04d}", *one) for n, one in enumerate(alone)]
    await load.pool.post("/flush_cache", {})
    async with asyncio.timeout(240):
        got, *heard, _, _ = await asyncio.gather(
            asyncio.gather(
                *(load.run(f"{BATCH_PREFIX}{n:04d}", *one) for n, one in enumerate(batch))
            ),
            load.heard("first", first),
            load.heard("second", second),
            load.gone("gone"),
            load.gone("left"),
        )
    assert [*got, *heard[0], *heard[1]] == expected
    totals = await be_totals(stages, "thinker")
    for name in ("decode_steps", "prefill_tokens"):
        assert totals[f"policy_be_{name}"] > 0, totals
    # Which of them happen depends on how the requests meet.
    moves = ("pauses", "requeued", "retracted")
    assert sum(totals[f"policy_be_{name}"] for name in moves) > 0, totals
    await until_idle(stages, "thinker")


async def test_long_decodes_leave_the_kv_of_idle_sessions(stages):
    load, rng = Load(stages, 8), random.Random(8)
    pool = load.pool

    def ids(n: int) -> list[int]:
        return [rng.randrange(10, 200) for _ in range(n)]

    long = {"max_new_tokens": 300, "temperature": 0}
    requests = [(ids(20), long) for _ in range(4)]
    expected = [await load.run(f"long-{n}", *one) for n, one in enumerate(requests)]
    # Other KV in the tree has its place among the sessions.
    await pool.post("/flush_cache", {})
    for name in ("idle-1", "idle-2"):
        await pool.open(name)
        await pool.say(name, ids(350), 4)
    before = await total(stages, "thinker", "policy_tokens_evicted")
    retracted = await total(stages, "thinker", "policy_retracted")
    # 1,280 tokens beside 708 of sessions, in a pool of 1,600.
    rids = [f"{BATCH_PREFIX}long-{n}" for n in range(4)]
    got = await asyncio.gather(
        *(load.run(rid, *one) for rid, one in zip(rids, requests, strict=True))
    )
    assert got == expected
    # A retracted request's KV is not free until its copy to the host is made.
    await until(stages, "thinker", "policy_retracted", lambda n: n > retracted)
    assert await total(stages, "thinker", "policy_tokens_evicted") - before < 100
    for name in ("idle-1", "idle-2"):
        await pool.close(name)


async def test_flex_speech_has_the_codes_of_speech_alone(stages):
    jobs = []
    for n in range(8):
        turn = greedy_turn(user(f"tell me {n}"), system="", n_tokens=8)
        links = stages.links(f"hybrid-{n}")
        await think(links, turn)
        jobs.append((links, replace(turn, temperature=None if n % 2 else 0.0, seed=900 + n)))
    expected = [await speak_to(*job, None) for job in jobs]

    async def codes(n: int) -> np.ndarray:
        links, turn = jobs[n]
        if n % 2:
            return await speak_to(links, replace(turn, flex=True), None)
        await asyncio.sleep(0.3 * n)
        return await speak_to(links, turn, random.Random(n))

    async with asyncio.timeout(120):
        got = await asyncio.gather(*map(codes, range(8)))
    for own, alone in zip(got, expected, strict=True):
        np.testing.assert_array_equal(own, alone)
    totals = await be_totals(stages, "talker")
    assert totals["policy_be_decode_steps"] > 0
    for links, _ in jobs:
        links.close()
