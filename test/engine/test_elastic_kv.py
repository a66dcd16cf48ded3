"""KV pools that exchange memory while they serve: no wrong token, no lost page, no file left."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from benchmark.native_client import native_client
from lab.attachment import joined
from lab.cpu_graphs.attach import environment as decode_graphs
from lab.poison import POISON
from sglang_live.extensions.elastic.engine.file_granules import GRANULE_BYTES
from sglang_live.extensions.elastic.messages import Obtainable, send
from sglang_live.extensions.elastic.policy import ElasticConfig
from sglang_live.extensions.elastic.pools import ElasticPools
from test.engine.conftest import Stages, running_stages
from test.engine.reference import Reference
from test.engine.small_pool import Pool, check
from test.engine.turns import greedy_turn, speak, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POOL_TOKENS = 1024
TALKER_TOKENS = 32_768
UNIT_ROWS = 32  # of both engines: 4 KiB of each buffer
POLICIES = ("urgency", "pacing", "truncate", "retention", "next-use", "hybrid")
GRAPHS = decode_graphs((1, 2, 4, 8))
HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}  # as by default on a GPU
VARIANTS = {
    "page-1-host-tier": (1, True, {}, HOST),
    "page-16-no-overlap-graphs": (16, False, GRAPHS, {}),
}


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=VARIANTS.values(), ids=VARIANTS.keys()
)
async def stages(request, endless_checkpoint, tmp_path_factory):
    page, overlap, environment, tier = request.param
    args = {"page_size": page, "disable_overlap_schedule": not overlap, "max_running_requests": 64}
    running = running_stages(
        endless_checkpoint,
        tmp_path_factory.mktemp("elastic"),
        args,
        policies=POLICIES,
        thinker_args={"max_total_tokens": POOL_TOKENS, **tier},
        talker_args={"max_total_tokens": TALKER_TOKENS},
        thinker_environment=joined(POISON, environment),
        talker_environment=environment,
        names=("thinker", "talker"),
        additions=(ElasticPools(),),
    )
    async with running as found:
        engines = found.additions[0].mover._engines
        async with asyncio.timeout(20):  # until the thinker knows of the talker's memory
            while engines["thinker"].obtainable <= 0:
                await asyncio.sleep(0.05)
        yield found


@pytest.fixture
def pool(stages) -> Pool:
    return Pool(stages)


@pytest.fixture
def mover(stages):
    return stages.additions[0].mover


async def generate(pool: Pool, ids: list[int], n: int, timeout_s: float = 120.0) -> dict:
    """The native API's answer to a prompt without a session."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": n, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }
    async with native_client(pool.spec, timeout_s) as client:
        return (await client.post("/generate", json=body)).json()


@torch.no_grad()
def causal_logprobs(reference: Reference, ids: list[int], n: int) -> torch.Tensor:
    """[n, vocabulary], of the last n tokens, without a mask of the context's size squared."""
    thinker, tokens = reference.model.thinker, torch.tensor([ids])
    states = thinker.model(
        inputs_embeds=thinker.get_input_embeddings()(tokens),
        position_ids=torch.arange(len(ids)).expand(3, 1, -1),
    ).last_hidden_state
    return torch.log_softmax(thinker.lm_head(states[0, -n - 1 : -1]).float(), dim=-1)


def random_ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(10, 200) for _ in range(n)]


async def tokens_of(stages: Stages, stage: str) -> int:
    await asyncio.sleep(0.7)
    return int((await stages.replica(stage).client.ping(5.0)).load["kv_tokens_total"])


@dataclass(frozen=True)
class KvProcess:
    """The process of an engine that has KV memory.

    Attributes:
        files: those of KV memory that are open, by inode: bytes of memory in them.
        mapped: bytes of KV memory that are mapped.
    """

    pid: int
    files: dict[int, int]
    mapped: int


def kv_process(stages: Stages, stage: str) -> KvProcess:
    found = []
    process = psutil.Process(stages.replica(stage).process.pid)
    for one in (process, *process.children(recursive=True)):
        files: dict[int, int] = {}
        n_files = 0
        for link in Path(f"/proc/{one.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if "sglang_live-kv" in os.readlink(link):
                    status = link.stat()
                    files[status.st_ino] = 512 * status.st_blocks
                    n_files += 1
        assert n_files == len(files), "a file is open twice"
        maps = Path(f"/proc/{one.pid}/maps").read_text().splitlines()
        spans = (line.split()[0].split("-") for line in maps if "sglang_live-kv" in line)
        mapped = sum(int(end, 16) - int(begin, 16) for begin, end in spans)
        if files or mapped:
            found.append(KvProcess(one.pid, files, mapped))
    (only,) = found
    return only


async def all_returned(mover, limit_s: float = 30.0) -> None:
    """Move everything back to where it began. The thinker knows then what it could receive."""
    start = mover._starts["thinker"]
    async with asyncio.timeout(limit_s):
        while (size := int(mover.report()["thinker_granules"])) != start:
            to = "talker" if size > start else "thinker"
            await mover.move(to, abs(size - start), urgent=True)
            await asyncio.sleep(0.05)
        while not mover.report()["thinker_obtainable"]:
            await asyncio.sleep(0.05)


class Speaker:
    """One response of the talker, again and again, with the codes that it has without moves."""

    def __init__(self, stages: Stages):
        self._stages, self._n = stages, 0

    async def begin(self, name: str) -> None:
        self._links = self._stages.links(name)
        self._turn = greedy_turn(user("hi"), system="s", n_tokens=8)
        await asyncio.wait_for(think(self._links, self._turn), 60)

    async def say(self) -> np.ndarray:
        self._n += 1
        turn = replace(self._turn, turn_id=f"{self._turn.turn_id}-{self._n}")
        return await asyncio.wait_for(speak(self._links, turn, list(range(20, 100)), 40), 60)

    async def compare(self, alone: np.ndarray, stop: asyncio.Event) -> int:
        """Speak until `stop`. Returns the number of responses."""
        n_said = 0
        while not stop.is_set():
            np.testing.assert_array_equal(await self.say(), alone)
            n_said += 1
        return n_said

    def close(self) -> None:
        self._links.close()


async def test_prompts_of_many_times_the_pool_have_the_reference_s_tokens(pool, mover, reference):
    """Eight times: 1,024 tokens of the thinker's own, and memory of the talker."""
    ids = random_ids(random.Random(1), 8 * POOL_TOKENS + 100)
    answer = await generate(pool, ids, 6)
    told = answer["meta_info"]["output_token_logprobs"]
    expected = causal_logprobs(reference, ids + [token for _, token, _ in told], len(told))
    for (logprob, token, _), row in zip(told, expected, strict=True):
        assert int(row.argmax()) == token
        assert abs(float(row[token]) - logprob) < 1e-4
    assert await tokens_of(pool.stages, "thinker") > 8 * POOL_TOKENS
    await all_returned(mover)


async def test_memory_that_becomes_obtainable_counts_for_the_next_request(pool, mover):
    """Two messages within the interval at which the engine reports its needs."""
    thinker, rng = mover._engines["thinker"], random.Random(12)
    body = {
        "input_ids": random_ids(rng, 3 * POOL_TOKENS),
        "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
    }
    async with native_client(pool.spec, 60) as client:
        for _ in range(3):
            send(thinker.link, Obtainable(0))
            await asyncio.sleep(0.002)
            send(thinker.link, Obtainable(thinker.obtainable))
            answer = (await client.post("/generate", json=body)).json()
            assert "error" not in answer, answer
            await all_returned(mover)


async def test_memory_counts_for_a_request_that_the_engine_reads_in_the_same_round(pool, mover):
    thinker, rng = mover._engines["thinker"], random.Random(13)
    process = psutil.Process(kv_process(pool.stages, "thinker").pid)
    for _ in range(3):
        send(thinker.link, Obtainable(0))
        await asyncio.sleep(0.1)
        process.suspend()
        send(thinker.link, Obtainable(thinker.obtainable))
        coming = asyncio.create_task(generate(pool, random_ids(rng, 3 * POOL_TOKENS), 2))
        await asyncio.sleep(0.1)
        process.resume()
        answer = await coming
        assert "error" not in answer, answer
        await all_returned(mover)


async def test_a_prompt_beyond_both_pools_is_refused_and_changes_nothing(pool, mover):
    before = mover.report()["thinker_granules"]
    answer = await generate(pool, random_ids(random.Random(2), 30_000), 4)
    assert "exceeds the maximum allowed length" in answer["error"]["message"]
    assert mover.report()["thinker_granules"] == before
    assert "error" not in await generate(pool, random_ids(random.Random(2), 300), 4)


async def moves_at_random(
    mover, rng: random.Random, stop: asyncio.Event, urgent_share: float = 0.7
) -> int:
    n_moved = 0
    while not stop.is_set():
        to, urgent = rng.choice(("thinker", "talker")), rng.random() < urgent_share
        n_moved += bool(await mover.move(to, rng.randrange(1, 600), urgent=urgent))
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.05)))
    return n_moved


async def test_outputs_are_equal_with_moves_at_any_moment(stages, pool, mover, reference):
    """Sessions of a pool that is too small, and speech, while memory moves all the time."""
    rng, speaker = random.Random(3), Speaker(stages)
    await speaker.begin("speaker-of-moves")
    alone = await speaker.say()
    stop = asyncio.Event()
    # With numbers of their own: what the sessions hear and say is the same in every run.
    moving = asyncio.create_task(moves_at_random(mover, random.Random(11), stop))
    speaking = asyncio.create_task(speaker.compare(alone, stop))
    names = [f"elastic-{n}" for n in range(12)]
    heard: dict[str, list[int]] = {name: [] for name in names}
    said: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for name in names:
        await pool.open(name)
    for n in range(80):
        name = rng.choice(names)
        if len(heard[name]) > 200:
            await pool.close(name)
            check(reference, heard[name], said[name])
            heard[name], said[name] = [], []
            await pool.open(name)
        new = random_ids(rng, rng.randrange(5, 60))
        if n % 10 == 0:
            other = asyncio.create_task(generate(pool, random_ids(rng, 300), 20))
        response = await pool.say(name, new, rng.randrange(2, 20))
        if n % 10 == 0:
            assert "error" not in await other
        heard[name] += new
        for token, logprob in response:
            said[name].append((len(heard[name]), logprob))
            heard[name].append(token)
    stop.set()
    n_moved, n_said = await asyncio.gather(moving, speaking)
    speaker.close()
    assert n_moved > 5 and n_said > 0
    for name in names:
        check(reference, heard[name], said[name])
        await pool.close(name)
    await all_returned(mover)
    await check_exact(stages, pool, mover)


async def check_exact(stages: Stages, pool: Pool, mover) -> None:
    """Everything is free, sizes are those of the start, and nothing else is mapped or in memory."""
    async with asyncio.timeout(10):  # sessions close in the background
        while await pool.load("kv_tokens_used") != 0:
            pass
    page = pool.spec.engine_args["page_size"]
    for stage, tokens in (("thinker", POOL_TOKENS), ("talker", TALKER_TOKENS)):
        assert await tokens_of(stages, stage) == (tokens + page) // UNIT_ROWS * UNIT_ROWS - page
    check_memory(stages, mover)


def check_memory(stages: Stages, mover) -> None:
    """Each engine maps what it has, no more is in memory, and no file is open in vain."""
    in_memory: dict[int, int] = {}
    for stage in ("thinker", "talker"):
        engine, granules = kv_process(stages, stage), int(mover.report()[f"{stage}_granules"])
        unmapped = granules * GRANULE_BYTES - engine.mapped
        unit = mover._engines[stage].hello.unit * GRANULE_BYTES
        assert 0 <= unmapped < unit, (stage, granules, engine)
        in_memory |= engine.files
        assert len(engine.files) <= mover.counts["engines_ended"] + 2
    assert sum(in_memory.values()) <= GRANULE_BYTES * total_granules(mover)


def total_granules(mover) -> int:
    return int(sum(mover.report()[f"{stage}_granules"] for stage in ("thinker", "talker")))


async def test_a_sequence_of_turns_is_bit_equal_with_and_without_moves(stages, pool, mover):
    async def turns(name: str) -> list:
        rng, told = random.Random(4), []
        await pool.post("/flush_cache", {})
        await pool.open(name)
        for _ in range(8):
            told += await pool.say(name, random_ids(rng, 40), 20)
        await pool.close(name)
        return told

    without = await turns("unmoved")
    stop = asyncio.Event()
    # Without evictions: a prefill of what was evicted sums in another order than the decode did.
    moving = asyncio.create_task(moves_at_random(mover, random.Random(5), stop, 0.0))
    with_moves = await turns("moved")
    stop.set()
    assert await moving > 0
    assert with_moves == without
    await all_returned(mover)


async def test_a_flush_between_moves_keeps_the_pool_exact(stages, pool, mover):
    rng = random.Random(6)
    for _ in range(6):
        await mover.move(rng.choice(("thinker", "talker")), rng.randrange(1, 900), urgent=True)
        assert "error" not in await generate(pool, random_ids(rng, 400), 4)
        await pool.post("/flush_cache", {})
        assert await pool.load("kv_tokens_used") == 0
    await all_returned(mover)
    await check_exact(stages, pool, mover)


async def test_memory_follows_the_load_and_does_not_move_to_and_fro(stages, pool, mover):
    """Nothing returns as long as the window has needed it; then all does that is worth a move."""
    rng, speaker = random.Random(9), Speaker(stages)
    await speaker.begin("speaker-of-loads")
    start = mover._starts["thinker"]
    kept = 2 * int(mover._config.least_share * total_granules(mover))  # for so little nothing moves
    for _ in range(2):
        with window_of(mover, 1000.0):
            sizes = []
            for _ in range(4):
                assert "error" not in await generate(pool, random_ids(rng, 4 * POOL_TOKENS), 4)
                sizes.append(mover.report()["thinker_granules"])
                assert len(await speaker.say()) == 40
            assert sizes == sorted(sizes) and sizes[0] > 4 * start
        with window_of(mover, 0.1):
            async with asyncio.timeout(60):
                while mover.report()["thinker_granules"] > start + kept:
                    await asyncio.sleep(0.1)
    speaker.close()
    await all_returned(mover)
    await check_exact(stages, pool, mover)


@contextlib.contextmanager
def window_of(mover, seconds: float) -> Iterator[None]:
    """Another window of the policy, so that the test needs no minutes."""
    kept = mover._config

    def set_window(config: ElasticConfig) -> None:
        mover._config = config
        for engine in mover._engines.values():
            engine.peak_needed._window_s = engine.peak_wished._window_s = config.elastic_window_s

    set_window(replace(kept, elastic_window_s=seconds))
    yield
    set_window(kept)


async def test_an_engine_that_is_stopped_holds_up_nothing_but_its_memory(stages, pool, mover):
    """SIGSTOP of the talker's scheduler, as of a debugger, and SIGCONT."""
    await all_returned(mover)
    total, rng = total_granules(mover), random.Random(10)
    n_late = mover.counts["orders_late"]
    talker = kv_process(stages, "talker").pid
    os.kill(talker, signal.SIGSTOP)
    try:
        # Its memory was promised. When it does not come, the request is refused.
        answer = await generate(pool, random_ids(rng, 3 * POOL_TOKENS), 4, timeout_s=30)
        assert "the KV pool can hold" in answer["error"]["message"]
        assert mover.counts["orders_late"] == n_late + 1
        assert "error" not in await generate(pool, random_ids(rng, 600), 4)
        answer = await generate(pool, random_ids(rng, 3 * POOL_TOKENS), 4)
        assert "exceeds the maximum allowed length" in answer["error"]["message"]
    finally:
        os.kill(talker, signal.SIGCONT)
    speaker = Speaker(stages)
    await speaker.begin("after-the-stop")
    assert len(await speaker.say()) == 40
    speaker.close()
    assert "error" not in await generate(pool, random_ids(rng, 3 * POOL_TOKENS), 4)
    await all_returned(mover)
    assert total_granules(mover) == total
    await check_exact(stages, pool, mover)


@pytest.mark.parametrize("victim", ["talker", "thinker"])
async def test_after_the_death_of_an_engine_the_memory_adds_up(stages, pool, mover, victim):
    """SIGKILL, while the thinker has much of the talker's memory."""
    await all_returned(mover)
    total = total_granules(mover)
    ids = random_ids(random.Random(7), 5 * POOL_TOKENS)
    assert "error" not in await generate(pool, ids, 4)
    assert mover.report()["thinker_granules"] > 5 * mover._starts["thinker"]
    n_starts = stages.replica(victim).n_starts
    os.kill(stages.replica(victim).ready.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while f"{victim}_granules" in mover.report():
            await asyncio.sleep(0.01)
    if victim == "talker":
        has = mover.report()["thinker_granules"]
        # In memory of the dead process, and not from the cache.
        assert "error" not in await generate(pool, ids[POOL_TOKENS:], 4)
        assert mover.report()["thinker_granules"] == has
    async with asyncio.timeout(90):
        while stages.replica(victim).n_starts == n_starts or not stages.replica(victim).is_up:
            await asyncio.sleep(0.1)
    assert total_granules(mover) == total
    assert "error" not in await generate(pool, random_ids(random.Random(8), 600), 4)
    speaker = Speaker(stages)
    await speaker.begin(f"after-{victim}")
    assert len(await speaker.say()) == 40
    speaker.close()
    await all_returned(mover)
    assert total_granules(mover) == total
    await check_exact(stages, pool, mover)
