"""Preemption between two slices does not change a prompt's output. Real thinker engines.

The pool's accounting is checked in every round (SGLang's strict check), so a leak ends the engine.
"""

import asyncio
import random

import pytest
import pytest_asyncio

from benchmark.native_client import native_client
from sglang_live.ids import THINK_PREFIX
from sglang_live.messages import Interrupt
from sglang_live.stages.engine_link import FeedSocket
from test.engine.conftest import Stages, running_stages
from test.engine.turns import greedy_turn, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POLICIES = ("urgency", "pacing", "truncate", "retention", "next-use")
VARIANTS = {
    "overlap": {},
    "pages-small-pool": {
        "disable_overlap_schedule": True,
        "page_size": 16,
        "max_total_tokens": 4800,
    },
}
N_TOKENS = 20


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=VARIANTS.values(), ids=VARIANTS.keys()
)
async def stages(request, endless_checkpoint, tmp_path_factory):
    stages = running_stages(
        endless_checkpoint,
        tmp_path_factory.mktemp("sliced-prefill"),
        {"chunked_prefill_size": 64, **request.param},
        thinker_environment={
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            # Responses outgrow their reserved room: the small pool is full in mid-prefill.
            "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
        },
        policies=POLICIES,
        names=("thinker",),
    )
    async with stages as running:
        yield running


class Api:
    def __init__(self, stages: Stages):
        self.stages, self._n = stages, 0
        self.spec = stages.replica("thinker").spec
        self.is_small = "max_total_tokens" in self.spec.engine_args
        self.feed = FeedSocket(self.spec.socket_path("inbox"))

    def rid(self, prefix: str) -> str:
        self._n += 1
        return f"{prefix}{id(self):x}-{self._n:06d}"

    async def generate(self, rid: str, prompt: list[int], n_tokens: int = N_TOKENS) -> dict:
        sampling = {"max_new_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
        async with native_client(self.spec, 120) as client:
            response = await client.post(
                "/generate", json={"rid": rid, "input_ids": prompt, "sampling_params": sampling}
            )
        assert response.status_code == 200, response.text
        return response.json()

    async def post(self, path: str, body: dict | None = None) -> None:
        async with native_client(self.spec, 30) as client:
            await client.post(path, json=body)

    async def load(self) -> dict[str, float]:
        await asyncio.sleep(0.7)
        return (await self.stages.replica("thinker").client.ping(5.0)).load


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def api(stages) -> Api:
    return Api(stages)


def prompt(rng: random.Random, n_tokens: int) -> list[int]:
    return [rng.randrange(10, 200) for _ in range(n_tokens)]


@pytest.mark.parametrize("prefix", ["plain-", THINK_PREFIX])
async def test_preempted_prompts_get_the_tokens_that_they_get_alone(api, prefix):
    before = await api.load()
    rng = random.Random(prefix)
    prompts = [prompt(rng, n) for n in (1800, 1200, 700)]
    asked = [asyncio.create_task(api.generate(api.rid(prefix), ids)) for ids in prompts]
    for _ in range(10):
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        prompts.append(prompt(rng, rng.randrange(5, 100)))
        asked.append(asyncio.create_task(api.generate(api.rid(THINK_PREFIX), prompts[-1])))
    got = [(await response)["output_ids"] for response in asked]
    after = await api.load()
    assert after["policy_prefills_preempted"] > before["policy_prefills_preempted"]
    assert after["requests_running"] == after["requests_waiting"] == 0
    await api.post("/flush_cache")
    for ids, output in zip(prompts, got, strict=True):
        alone = await api.generate(api.rid("plain-"), ids)
        assert output == alone["output_ids"]


async def test_preempted_turns_get_the_tokens_that_they_get_alone(api, stages, speech):
    """In sessions, with 11 s of speech among the text."""
    before = await api.load()
    words = " ".join(random.Random(5).choices(("the", "cat", "sat", "on", "a", "mat"), k=500))
    history = user(words, speech, words)

    async def response(name: str) -> list[int]:
        links = stages.links(name)
        try:
            first = await think(links, greedy_turn(history, system="s", n_tokens=N_TOKENS))
            return first.ids
        finally:
            links.close()

    async def ask(at: int) -> None:
        links = stages.links(f"short-{at}")
        await think(links, greedy_turn(user(f"and {at}"), system="s", n_tokens=4))
        links.close()

    alone = await response("alone")
    beside = asyncio.create_task(response("beside"))
    at = 0
    while not beside.done():
        await ask(at)
        at += 1
    assert await beside == alone
    after = await api.load()
    assert after["policy_prefills_preempted"] > before["policy_prefills_preempted"]


async def test_a_preempted_prompt_can_be_aborted_and_interrupted(api):
    rng = random.Random(7)
    rids = [api.rid(THINK_PREFIX) for _ in range(2)]
    before = await api.load()
    long = [asyncio.create_task(api.generate(rid, prompt(rng, 1500))) for rid in rids]

    async def keep_asking() -> None:
        while True:
            await api.generate(api.rid(THINK_PREFIX), prompt(rng, 20))

    asking = [asyncio.create_task(keep_asking()) for _ in range(2)]
    await asyncio.sleep(0.3)
    await api.post("/abort_request", {"rid": rids[0]})
    api.feed.send(Interrupt(rids[1]))
    aborted, ended = await asyncio.wait_for(asyncio.gather(*long), 60)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert ended["meta_info"]["finish_reason"]["type"] == "length"
    assert len(ended["output_ids"]) < N_TOKENS
    after = await api.load()
    assert after["policy_prefills_preempted"] > before["policy_prefills_preempted"]
    assert after["requests_running"] == after["requests_waiting"] == 0


async def test_responses_that_outgrow_a_small_pool_take_the_memory_of_preempted_prefills(api):
    before = await api.load()
    rng = random.Random(11)
    prompts = [prompt(rng, 30) for _ in range(8)]
    asked = [asyncio.create_task(api.generate(api.rid(THINK_PREFIX), ids, 420)) for ids in prompts]
    await asyncio.sleep(0.5)
    prompts.append(prompt(rng, 3000))
    asked.append(asyncio.create_task(api.generate(api.rid("plain-"), prompts[-1], 420)))
    got = [(await response)["output_ids"] for response in asked]
    after = await api.load()
    assert after["requests_running"] == after["requests_waiting"] == 0
    if api.is_small:
        assert after["policy_retracted"] > before["policy_retracted"]
    await api.post("/flush_cache")
    for ids, output in zip(prompts, got, strict=True):
        alone = await api.generate(api.rid("plain-"), ids, 420)
        assert output == alone["output_ids"]
