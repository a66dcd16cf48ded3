"""Requests that were held say what they would have said: tokens, penalties, seeds, codes.

Real engines with policies on. The holds are those of pacing: the tests play the consumer, whose
progress comes over the control channel in random steps, so streams leave and return at random.
"""

import asyncio
import random

import httpx
import pytest
import pytest_asyncio

from sglang_live.bridge.feed_types import THINK_PREFIX, Progress
from sglang_live.stages.engine_host import FeedSocket
from test.engine.conftest import Stages, running_stages

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POLICIES = ("urgency", "pacing", "truncate")
N_TOKENS = 60
# One request each; together they need every kind of penalty at once.
SAMPLING = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0, "frequency_penalty": 0.9},
    {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": -0.3},
    {"temperature": 0, "min_new_tokens": 40, "repetition_penalty": 1.1},
    {"temperature": 0.8, "top_k": 1, "presence_penalty": 1.0},
)


class Consumers:
    """Play the talker for requests of the thinker: take their tokens in random steps."""

    def __init__(self, feed: FeedSocket, seed: int):
        self._feed, self._random = feed, random.Random(seed)
        self._taken_s: dict[str, float] = {}

    async def take(self, rids: list[str]) -> None:
        self._taken_s = dict.fromkeys(rids, 0.0)
        while True:
            for rid in rids:
                if self._random.random() < 0.5:
                    self._taken_s[rid] += self._random.choice((0.08, 0.3, 0.8, 2.0))
            taken = [self._taken_s[rid] for rid in rids]
            n = len(rids)
            self._feed.send(Progress(rids, taken, [False] * n, [0.5] * n))
            await asyncio.sleep(self._random.uniform(0.01, 0.08))


class Thinker:
    """The thinker's engine over SGLang's own API, and the control channel into it."""

    def __init__(self, stages: Stages):
        self._stages = stages
        spec = stages.replica("thinker").spec
        self._url = f"http://127.0.0.1:{spec.native_port}"
        self.feed = FeedSocket(spec.socket_path("inbox"))
        self._n_runs = 0

    def rids(self, managed: bool) -> list[str]:
        self._n_runs += 1
        prefix = THINK_PREFIX if managed else "plain-"
        return [f"{prefix}{self._n_runs:08d}-{i:04d}" for i in range(len(SAMPLING))]

    async def generate(self, rid: str, prompt: list[int], sampling: dict) -> dict:
        request = {
            "rid": rid,
            "input_ids": prompt,
            "sampling_params": {**sampling, "ignore_eos": "min_new_tokens" not in sampling},
        }
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{self._url}/generate", json=request)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def run(self, rids: list[str], prompts: list[list[int]]) -> list[list[int]]:
        answers = await asyncio.gather(
            *(
                self.generate(rid, prompt, {"max_new_tokens": N_TOKENS, **sampling})
                for rid, prompt, sampling in zip(rids, prompts, SAMPLING, strict=True)
            )
        )
        return [answer["output_ids"] for answer in answers]

    async def total(self, name: str) -> float:
        """A counter of the scheduler, as the stage reports it."""
        await asyncio.sleep(0.7)
        ready = await self._stages.replica("thinker").client.ping(5.0)
        return ready.load[f"policy_{name}"]


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[False, True], ids=["overlap", "no-overlap"]
)
async def live_stages(request, endless_checkpoint, tmp_path_factory):
    cache = tmp_path_factory.mktemp("holds")
    args = {"disable_overlap_schedule": request.param, "chunked_prefill_size": 64}
    async with running_stages(endless_checkpoint, cache, args, policies=POLICIES) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(live_stages) -> Thinker:
    return Thinker(live_stages)


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 200) for _ in range(rng.randrange(5, 90))] for _ in SAMPLING]


async def test_held_requests_say_what_unheld_ones_say(thinker):
    before = await thinker.total("holds")
    for seed in range(12):
        prompts = prompts_of(seed)
        expected = await thinker.run(thinker.rids(managed=False), prompts)
        rids = thinker.rids(managed=True)
        consuming = asyncio.create_task(Consumers(thinker.feed, seed).take(rids))
        try:
            got = await thinker.run(rids, prompts)
        finally:
            consuming.cancel()
        assert got == expected, f"seed {seed}"
    # Shown to have happened, or the claim would be empty.
    assert await thinker.total("holds") - before > 60
