"""A pause does not change a request's output: tokens, penalties, seeds, codes.

Real engines with policies on. Pacing makes the pauses: the tests take the consumer's part, whose
progress arrives over the control channel in random steps, so streams pause and resume at random.
"""

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmark.native_client import native_client
from sglang_live.ids import THINK_PREFIX
from sglang_live.messages import HeardOfMany, Interrupt
from sglang_live.stages.engine_link import FeedSocket
from test.engine.conftest import IS_NIGHTLY, Stages, running_stages
from test.engine.gauges import load_of, total, until
from test.engine.turns import greedy_turn, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POLICIES = ("urgency", "pacing", "truncate")
N_TOKENS = 60
MORE_PATTERNS = 20
# One request each; together they have every kind of penalty.
SAMPLING = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0, "frequency_penalty": 0.9},
    {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": -0.3},
    {"temperature": 0, "min_new_tokens": 40, "repetition_penalty": 1.1},
    {"temperature": 0.8, "top_k": 1, "presence_penalty": 1.0},
)


def pause_s(chance: random.Random) -> float:
    """The time between two steps: short, or so long that also a slow engine is ahead."""
    return chance.uniform(0.6, 1.2) if chance.random() < 0.1 else chance.uniform(0.01, 0.08)


class Consumers:
    """The talker's part for requests of the thinker: consume tokens in random steps."""

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
            self._feed.send(HeardOfMany.of(rids, taken, [False] * n))
            await asyncio.sleep(pause_s(self._random))


class Thinker:
    """The thinker's engine over SGLang's own API, and the control channel into it."""

    def __init__(self, stages: Stages):
        spec = stages.replica("thinker").spec
        self.spec = spec
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
        async with native_client(self.spec, 180) as client:
            response = await client.post("/generate", json=request)
        assert response.status_code == 200, response.text
        return response.json()

    async def run(self, rids: list[str], prompts: list[list[int]]) -> list[list[int]]:
        responses = await asyncio.gather(
            *(
                self.generate(rid, prompt, {"max_new_tokens": N_TOKENS, **sampling})
                for rid, prompt, sampling in zip(rids, prompts, SAMPLING, strict=True)
            )
        )
        return [response["output_ids"] for response in responses]


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=["overlap", "by-turns", "no-overlap"]
)
async def live_stages(request, endless_checkpoint, tmp_path_factory):
    cache = tmp_path_factory.mktemp("holds")
    retracts, by_turns = request.param == "no-overlap", request.param == "by-turns"
    args = {"disable_overlap_schedule": retracts, "chunked_prefill_size": 64}
    # With overlap off, the talker also retracts a running response every few rounds.
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    environment = retract if retracts else None
    stages = running_stages(
        endless_checkpoint,
        cache,
        args,
        environment,
        policies=(*POLICIES, "arbiter") if by_turns else POLICIES,
        shares_device=True,
    )
    async with stages as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(live_stages) -> Thinker:
    return Thinker(live_stages)


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 200) for _ in range(rng.randrange(5, 90))] for _ in SAMPLING]


def pause_patterns(n: int):
    """Engines are shared by all examples, and examples take seconds. n: nightly, else half."""
    return settings(
        max_examples=n if IS_NIGHTLY else n // 2,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pause_patterns(12)
@given(seed=st.integers(0, 2**32))
async def test_paused_requests_write_the_tokens_of_unpaused_ones(thinker, seed):
    await check_tokens(thinker, seed)


async def check_tokens(thinker: Thinker, seed: int) -> None:
    prompts = prompts_of(seed)
    expected = await thinker.run(thinker.rids(managed=False), prompts)
    rids = thinker.rids(managed=True)
    consuming = asyncio.create_task(Consumers(thinker.feed, seed).take(rids))
    try:
        got = await thinker.run(rids, prompts)
    finally:
        consuming.cancel()
    assert got == expected


async def speak_to(links, turn, listener: random.Random | None) -> np.ndarray:
    """All codes of a response of 90 tokens' text; the listener plays it in random steps."""
    frames: list[np.ndarray] = []
    async with links.talker.open(turn) as speech:
        await speech.write(list(range(20, 110)), "a")
        async with aclosing(speech.frames()) as chunks:
            hearing = asyncio.create_task(hear(speech, listener)) if listener else None
            async for codes in chunks:
                frames.extend(np.frombuffer(codes, "<i2").reshape(-1, 16))
                if len(frames) >= 80:
                    break
            if hearing:
                hearing.cancel()
    return np.stack(frames[:80])


async def hear(speech, listener: random.Random) -> None:
    heard_s = 0.0
    while True:
        speech.report(heard_s, False)
        await asyncio.sleep(pause_s(listener))
        heard_s += listener.choice((0.0, 0.0, 0.1, 0.3))


class Talkers:
    """Eight responses at once: sampled from their seeds and greedy, with repetition penalty."""

    def __init__(self, stages: Stages):
        self._stages, self._n_runs = stages, 0
        self.unheld: list[np.ndarray] | None = None

    async def codes(self, listeners: list) -> list[np.ndarray]:
        self._n_runs += 1
        jobs = []
        for seed, listener in enumerate(listeners):
            turn = greedy_turn(user(f"tell me {seed}"), system="", n_tokens=8)
            links = self._stages.links(f"codes-{self._n_runs}-{seed}")
            await think(links, turn)
            temperature = None if seed % 2 else 0.0
            jobs.append((links, replace(turn, temperature=temperature, seed=1000 + seed), listener))
        codes = await asyncio.gather(*(speak_to(*job) for job in jobs))
        for links, _, _ in jobs:
            links.close()
        return codes


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def talkers(live_stages) -> Talkers:
    talkers = Talkers(live_stages)
    talkers.unheld = await talkers.codes([None] * 8)
    return talkers


@pause_patterns(4)
@given(seed=st.integers(0, 2**32))
async def test_paused_streams_have_the_codes_of_unpaused_ones(talkers, seed):
    await check_codes(talkers, seed)


async def check_codes(talkers: Talkers, seed: int) -> None:
    got = await talkers.codes([random.Random(seed + i) for i in range(8)])
    for codes, unheld in zip(got, talkers.unheld, strict=True):
        np.testing.assert_array_equal(codes, unheld)


async def test_the_patterns_did_pause_and_resume(live_stages, thinker, talkers):
    """Without pauses the claims above would be empty. A slow engine pauses in fewer examples."""
    for stage, check in (("thinker", check_tokens), ("talker", check_codes)):
        for name in ("policy_pauses", "policy_resumes"):
            for seed in range(MORE_PATTERNS):
                if await total(live_stages, stage, name) > 20:
                    break
                await check(thinker if stage == "thinker" else talkers, seed)
            assert await total(live_stages, stage, name) > 20, f"{stage}: {name}"


async def test_only_engines_with_turns_had_them(live_stages, talkers):
    by_turns = any(one.spec.turns for one in live_stages.supervisor.replicas)
    for stage in ("thinker", "talker"):
        load = await load_of(live_stages, stage)
        assert (load.get("policy_device_turns", 0) > 50) == by_turns
        assert load.get("policy_device_turns_missed", 0) == 0


async def until_paused(stages: Stages, thinker: Thinker, rids: list[str]) -> None:
    """Stop the consumers of these requests until all are paused."""
    n = len(rids)

    async def stand_still() -> None:
        while True:
            thinker.feed.send(HeardOfMany.of(rids, [0.0] * n, [False] * n))
            await asyncio.sleep(0.01)

    standing = asyncio.create_task(stand_still())
    try:
        for _ in range(40):
            if await total(stages, "thinker", "policy_paused_now") >= n:
                return
        ready = await stages.replica("thinker").client.ping(5.0)
        raise AssertionError(f"not held: {ready.load}")
    finally:
        standing.cancel()


async def test_a_paused_request_can_be_aborted_and_interrupted(live_stages, thinker):
    rids = thinker.rids(managed=True)[:2]
    long = {"max_new_tokens": 2000, "temperature": 0}
    running = [
        asyncio.create_task(thinker.generate(rid, prompt, long))
        for rid, prompt in zip(rids, prompts_of(5), strict=False)
    ]
    await until_paused(live_stages, thinker, rids)
    async with native_client(thinker.spec, 30) as client:
        await client.post("/abort_request", json={"rid": rids[0]})
    aborted = await running[0]
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    thinker.feed.send(Interrupt(rids[1]))
    ended = await running[1]
    assert ended["meta_info"]["finish_reason"]["type"] == "length"
    assert 0 < len(ended["output_ids"]) < 200
    for name in ("policy_paused_now", "requests_running"):
        await until(live_stages, "thinker", name, lambda n: n == 0)


async def test_a_cache_is_not_flushed_under_a_paused_request(live_stages, thinker):
    [rid] = thinker.rids(managed=True)[:1]
    sampling = {"max_new_tokens": 90, "temperature": 0}
    [prompt] = prompts_of(6)[:1]
    expected = await thinker.generate("plain-flush", prompt, sampling)
    running = asyncio.create_task(thinker.generate(rid, prompt, sampling))
    await until_paused(live_stages, thinker, [rid])
    async with native_client(thinker.spec, 30) as client:
        response = await client.post("/flush_cache")
    assert response.status_code != 200
    thinker.feed.send(HeardOfMany.of([rid], [1000.0], [False]))
    assert (await running)["output_ids"] == expected["output_ids"]
