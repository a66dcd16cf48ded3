"""Idle sessions on the host are loaded unchanged at any time."""

import asyncio
import random

import pytest
import pytest_asyncio

from lab.poison import POISON
from sglang_live.messages import NextUseHint, TruncateSession, UserSpeaking
from test.engine.bounded_sessions import SINK, BoundedSession, Engine
from test.engine.conftest import IS_NIGHTLY, running_stages
from test.engine.small_pool import Pool, check

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POOL_TOKENS = 1024
POLICIES = ("urgency", "pacing", "truncate", "retention", "next-use", "preload")
HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
VARIANTS = {"page-1": (1, True, ""), "page-16-no-overlap-slow-link": (16, False, "slow_link")}


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=VARIANTS.values(), ids=VARIANTS.keys()
)
async def stages(request, endless_checkpoint, tmp_path_factory):
    page, overlap, device_model = request.param
    args = {
        "page_size": page,
        "max_total_tokens": POOL_TOKENS,
        "disable_overlap_schedule": not overlap,
        "max_running_requests": 64,
    }
    running = running_stages(
        endless_checkpoint,
        tmp_path_factory.mktemp("host-tier"),
        args,
        policies=POLICIES,
        thinker_args=HOST,
        thinker_environment=POISON,
        device_model=device_model,
        names=("thinker",),
    )
    async with running as found:
        found.page = page
        found.has_slow_link = bool(device_model)
        yield found


@pytest.fixture
def pool(stages) -> Pool:
    return Pool(stages)


async def check_all_is_free(pool: Pool) -> None:
    assert await pool.load("kv_tokens_used") == 0
    assert await pool.load("policy_tokens_idle") == 0
    assert await pool.load("policy_tokens_on_host") == 0


async def test_sessions_loaded_from_the_host_continue_with_equal_tokens(pool, reference):
    """With speech starts at any moment before the request, truncations, and closes."""
    rng = random.Random(7)
    names = [f"session-{n}" for n in range(16)]
    heard: dict[str, list[int]] = {name: [] for name in names}
    said: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    lost = await pool.load("policy_tokens_lost")
    for name in names:
        await pool.open(name)
    for _ in range(160 if IS_NIGHTLY else 100):
        name = rng.choice(names)
        if rng.random() < 0.15 and said[name]:
            # The newest token is computed by the next request.
            kept = rng.randrange(said[name][0][0], len(heard[name]))
            del heard[name][kept:]
            said[name] = [(at, logprob) for at, logprob in said[name] if at < kept]
            pool.feed.send(TruncateSession(name, kept))
            await asyncio.sleep(0.2)  # it is sent on another socket than the request
        if len(heard[name]) > 180:
            await pool.close(name)
            check(reference, heard[name], said[name])
            heard[name], said[name] = [], []
            await pool.open(name)
        if rng.random() < 0.5:
            pool.feed.send(UserSpeaking(name))
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.05, 0.2)))
        new = [rng.randrange(10, 200) for _ in range(rng.randrange(5, 50))]
        response = await pool.say(name, new, rng.randrange(2, 20))
        # Its KV may be evicted for that of a user who speaks.
        pool.feed.send(NextUseHint(name, 30.0, None, None))
        heard[name] += new
        for token, logprob in response:
            said[name].append((len(heard[name]), logprob))
            heard[name].append(token)
    assert await pool.load("policy_tokens_evicted") > POOL_TOKENS
    assert await pool.load("policy_tokens_lost") == lost
    assert await pool.load("policy_loads") > 0
    assert await pool.load("policy_preloads") > 0
    for name in names:
        check(reference, heard[name], said[name])
        await pool.close(name)
    await check_all_is_free(pool)


async def test_bounded_sessions_move_between_tiers_and_are_compacted(stages, pool, reference):
    engine = Engine(stages, stages.page)
    rng = random.Random(11)
    sessions = [BoundedSession(engine, f"bounded-{n}") for n in range(14)]
    for session in sessions:
        await session.open()
    for n in range(120 if IS_NIGHTLY else 80):
        session = sessions[n] if n < len(sessions) else rng.choice(sessions)
        n_new = rng.randrange(1, 60) if session.ids else SINK
        if rng.random() < 0.5:
            engine.feed.send(UserSpeaking(session.name))
            await asyncio.sleep(rng.choice((0.0, 0.02, 0.1)))
        await session.turn([rng.randrange(10, 200) for _ in range(n_new)], rng.randrange(1, 30))
    assert sum(session.n_dropped for session in sessions) > POOL_TOKENS
    for session in sessions:
        session.check(reference)
        await session.close()
    await check_all_is_free(pool)


async def test_many_sessions_share_the_pool_and_the_host(pool, reference):
    """All at once, with speech starts between: every turn gets the right response."""

    async def session(n: int) -> None:
        rng, name = random.Random(n), f"crowd-{n}"
        heard: list[int] = []
        said: list[tuple[int, float]] = []
        await pool.open(name)
        for _ in range(4):
            if rng.random() < 0.5:
                pool.feed.send(UserSpeaking(name))
                await asyncio.sleep(rng.random() / 10)
            new = [rng.randrange(10, 200) for _ in range(rng.randrange(5, 30))]
            response = await pool.say(name, new, rng.randrange(2, 12), timeout_s=180)
            heard += new
            for token, logprob in response:
                said.append((len(heard), logprob))
                heard.append(token)
        check(reference, heard, said)
        await pool.close(name)

    await asyncio.gather(*(session(n) for n in range(30)))
    await check_all_is_free(pool)


async def test_a_prefill_waits_for_kv_that_comes_slowly_while_others_decode(
    stages, pool, reference
):
    rng = random.Random(3)
    heard = [rng.randrange(10, 200) for _ in range(640)]
    said: list[tuple[int, float]] = []
    for name in ("returns", "takes the pool", "decodes"):
        await pool.open(name)
    for token, logprob in await pool.say("returns", heard, 4):
        said.append((len(heard), logprob))
        heard.append(token)
    await pool.say("takes the pool", [rng.randrange(10, 200) for _ in range(900)], 2)
    awaited = await pool.load("policy_prefills_awaited_kv")
    async with pool.saying("decodes", list(range(20, 40)), 300):
        heard += range(50, 55)
        for token, logprob in await pool.say("returns", list(range(50, 55)), 8):
            said.append((len(heard), logprob))
            heard.append(token)
    check(reference, heard, said)
    # Over the slow link it takes 65 ms, otherwise less than a round.
    awaited = await pool.load("policy_prefills_awaited_kv") - awaited
    assert awaited == stages.has_slow_link
    for name in ("returns", "takes the pool", "decodes"):
        await pool.close(name)
    await check_all_is_free(pool)


async def test_aborting_a_waiting_request_leaves_its_session_unchanged(pool, reference):
    """In stock SGLang the session refuses every later turn, and never closes."""
    await pool.open("waits")
    heard: list[int] = []
    said: list[tuple[int, float]] = []

    async def turn(new: list[int]) -> None:
        heard.extend(new)
        for token, logprob in await pool.say("waits", new, 4):
            said.append((len(heard), logprob))
            heard.append(token)

    await turn([10 + i for i in range(40)])
    await pool.open("takes-all")
    async with pool.saying("takes-all", [50] * 400, 500):
        body = {
            "rid": "in-the-queue",
            "input_ids": [60] * 300,
            "session_params": {"id": "waits"},
            "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        }
        waiting = asyncio.create_task(pool.post("/generate", body))
        while not waiting.done():  # an abort that arrives before its request has no effect
            await pool.post("/abort_request", {"rid": "in-the-queue"})
            await asyncio.sleep(0.05)
        aborted = waiting.result().json()["meta_info"]["finish_reason"]
    assert (aborted["type"], aborted["message"]) == ("abort", "Abort in waiting queue")
    await turn([20, 30, 40])
    check(reference, heard, said)
    for name in ("waits", "takes-all"):
        await pool.close(name)
    await check_all_is_free(pool)


async def test_a_full_host_costs_only_a_prefill(pool, reference):
    names = [f"many-{n}" for n in range(60)]
    said: dict[str, list] = {}
    lost = await pool.load("policy_dropped_tokens_lost")
    for n, name in enumerate(names):
        await pool.open(name)
        prompt = [10 + (n + i) % 180 for i in range(100)]
        said[name] = [prompt, await pool.say(name, prompt, 4)]
    assert await pool.load("policy_dropped_tokens_lost") > lost
    for name in (*names[:3], *names[-3:]):
        prompt, response = said[name]
        heard = prompt + [token for token, _ in response]
        more = await pool.say(name, [20, 30, 40], 4)
        told = [(len(prompt) + i, logprob) for i, (_, logprob) in enumerate(response)]
        heard += [20, 30, 40]
        told += [(len(heard) + i, logprob) for i, (_, logprob) in enumerate(more)]
        check(reference, heard + [token for token, _ in more], told)
    for name in names:
        await pool.close(name)
    await check_all_is_free(pool)
