"""More sessions than the pool holds: evicted sessions continue with the same tokens."""

import asyncio
import random
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from benchmark.native_client import native_client
from test.engine.conftest import running_stages
from test.engine.small_pool import Pool, check
from test.engine.turns import greedy_turn, reply_of, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POOL_TOKENS = 320
SYSTEM = "You are a kind assistant."


async def pool_of(checkpoint, cache, policies, page: int, overlap: bool):
    args = {
        "page_size": page,
        "max_total_tokens": POOL_TOKENS,
        "disable_overlap_schedule": not overlap,
        "max_running_requests": 16,
    }
    return running_stages(checkpoint, cache, args, policies=policies, names=("thinker",))


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[(1, True), (16, False)],
    ids=["page-1", "page-16-no-overlap"],
)
async def pool(request, endless_checkpoint, tmp_path_factory):
    page, overlap = request.param
    cache = tmp_path_factory.mktemp("full-pool")
    policies = ("urgency", "pacing", "truncate", "retention", "next-use")
    async with await pool_of(endless_checkpoint, cache, policies, page, overlap) as stages:
        yield Pool(stages)


async def test_stock_sessions_block_a_third_forever(endless_checkpoint, tmp_path_factory):
    """Stock SGLang: no error, no progress."""
    cache = tmp_path_factory.mktemp("stock-pool")
    async with await pool_of(endless_checkpoint, cache, ("truncate",), 1, True) as stages:
        pool = Pool(stages)
        for name in ("one", "two", "three"):
            await pool.open(name)
        await pool.say("one", list(range(20, 140)), 20)
        await pool.say("two", list(range(140, 260)), 20)
        third = asyncio.create_task(pool.say("three", list(range(300, 400)), 20))
        await asyncio.sleep(5)
        assert not third.done()
        await pool.close("one")
        assert len(await third) == 20


async def test_no_prompt_that_nearly_fills_the_pool_waits_forever(pool):
    """Each is answered or refused, and the longest that is answered leaves two pages at most."""
    rng, answered = random.Random(2), []
    async with native_client(pool.spec, 20) as client:
        for n in range(POOL_TOKENS - 50, POOL_TOKENS + 3):
            body = {
                "input_ids": [rng.randrange(10, 200) for _ in range(n)],
                "sampling_params": {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True},
            }
            response = await client.post("/generate", json=body)
            assert response.status_code in (200, 400), response.text
            if response.status_code == 200:
                answered.append(n)
    assert answered and max(answered) >= POOL_TOKENS - 2 * 16 - 6
    assert answered == list(range(POOL_TOKENS - 50, max(answered) + 1))


async def test_idle_sessions_are_evicted_and_continue_with_equal_tokens(pool, reference):
    rng = random.Random(3)
    names = [f"session-{n}" for n in range(6)]
    heard: dict[str, list[int]] = {name: [] for name in names}
    said: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for name in names:
        await pool.open(name)
    for _ in range(30):
        name = rng.choice(names)
        if len(heard[name]) > 200:
            continue
        new = [rng.randrange(10, 200) for _ in range(rng.randrange(5, 50))]
        response = await pool.say(name, new, rng.randrange(2, 20))
        heard[name] += new
        for token, logprob in response:
            said[name].append((len(heard[name]), logprob))
            heard[name].append(token)
    assert sum(map(len, heard.values())) > 2 * POOL_TOKENS
    assert await pool.load("policy_tokens_evicted") > POOL_TOKENS
    for name in names:
        check(reference, heard[name], said[name])
        await pool.close(name)
    assert await pool.load("kv_tokens_used") == 0
    assert await pool.load("policy_tokens_idle") == 0


async def test_many_concurrent_sessions_all_end(pool):
    """More requests of sessions than fit wait for each other, and all end."""

    async def session(n: int) -> int:
        rng, name = random.Random(n), f"crowd-{n}"
        await pool.open(name)
        n_said = 0
        for _ in range(4):
            new = [rng.randrange(10, 200) for _ in range(rng.randrange(5, 40))]
            n_said += len(await pool.say(name, new, rng.randrange(2, 16), timeout_s=120))
        await pool.close(name)
        return n_said

    assert all(await asyncio.gather(*(session(n) for n in range(12))))
    assert await pool.load("kv_tokens_used") == 0


async def test_evicted_clips_are_computed_again(pool, speech):
    """Their hidden states for the talker are computed again too."""
    sessions = []
    for n in range(4):
        history = [user(speech[20_000 * n :][:24_000])]
        links = pool.stages.links(f"spoken-{n}")
        turn = greedy_turn(*history, system=SYSTEM, n_tokens=12)
        done = await think(links, turn)
        sessions.append((links, [*history, reply_of(turn, done)]))
    for n, (links, history) in enumerate(sessions):
        history += [user(speech[5_000 + 9_000 * n :][:16_000])]
        turn = greedy_turn(*history, system=SYSTEM, n_tokens=12)
        again = await think(links, turn)
        assert not again.rebuilt
        fresh_links = pool.stages.links("")
        fresh = await think(fresh_links, greedy_turn(*history, system=SYSTEM, n_tokens=12))
        assert again.ids == fresh.ids
        states = [links.thinker.segments[item.key].states for item in (history[0], history[2])]
        others = [fresh_links.thinker.segments[i.key].states for i in (history[0], history[2])]
        for own, other in zip(states, others, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(own), torch.from_numpy(other), atol=1e-4, rtol=1e-4
            )
    for links, _ in sessions:
        links.close()
    assert await pool.load("policy_tokens_evicted") > 0


async def test_sessions_share_the_kv_of_equal_instructions(pool):
    header = list(range(300, 380))
    for name in ("first", "second"):
        await pool.open(name)
        body = {
            "input_ids": header,
            "session_params": {"id": name},
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        }
        meta = (await pool.post("/generate", body)).json()["meta_info"]
    # A request computes its last token in any case.
    assert meta["cached_tokens"] >= 64
    await pool.say("first", [20, 21, 22], 2)
    await pool.say("second", [30, 31, 32], 2)
    assert await pool.load("kv_tokens_used") <= len(header)
    for name in ("first", "second"):
        await pool.close(name)
    assert await pool.load("kv_tokens_used") == 0


async def plain(pool, ids: list[int]) -> int:
    """Run a request without a session. Returns the number of its cached tokens."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    response = (await pool.post("/generate", body)).json()
    return response["meta_info"]["cached_tokens"]


async def test_prompts_and_sessions_are_evicted_in_one_order(pool):
    """The least recently used is evicted first, prompt or session."""
    await pool.post("/flush_cache", {})
    prompt, other = list(range(20, 120)), list(range(120, 190))
    await pool.open("old")
    await pool.say("old", list(range(30, 130)), 4)
    await asyncio.sleep(1.0)
    await plain(pool, prompt)
    n_evicted = await pool.load("policy_tokens_evicted")
    await plain(pool, [*other, *other])
    assert await pool.load("policy_tokens_evicted") > n_evicted
    assert await plain(pool, prompt) >= 96
    await pool.close("old")

    await pool.post("/flush_cache", {})
    await plain(pool, prompt)
    await asyncio.sleep(1.0)
    await pool.open("new")
    await pool.say("new", list(range(30, 130)), 4)
    n_evicted = await pool.load("policy_tokens_evicted")
    await plain(pool, [*other, *other])
    assert await pool.load("policy_tokens_evicted") == n_evicted
    assert await plain(pool, prompt) < 96
    await pool.close("new")


async def test_evicted_kv_is_computed_while_the_user_begins_to_speak(pool):
    words = "the cat sat on a mat and looked at me " * 4
    histories, links = [], []
    for name in ("preheated", "left alone"):
        links.append(pool.stages.links(name))
        turn = greedy_turn(user(words), system=SYSTEM, n_tokens=12)
        histories.append([*turn.history, reply_of(turn, await think(links[-1], turn))])
    # Others take all of the pool.
    others = ("one", "two", "three")
    for name in others:
        await pool.open(name)
        await pool.say(name, list(range(20, 200)), 2)
    for name in others:
        await pool.close(name)
    speaks = greedy_turn(*histories[0], system=SYSTEM, n_tokens=12)
    for _ in range(2):
        await think(links[0], replace(speaks, prefill_only=True, preheat=True))
    assert await pool.load("preheats_evicted") == 1
    assert await pool.load("preheats_needless") == 1
    computed = []
    for link, history in zip(links, histories, strict=True):
        turn = greedy_turn(*history, user("and now?"), system=SYSTEM, n_tokens=12)
        done = await think(link, turn)
        fresh = await think(pool.stages.links(""), turn)
        assert done.ids == fresh.ids and not done.rebuilt
        computed.append(done.n_prompt - done.n_cached)
        link.close()
    assert computed[0] < 40 < computed[1], "tokens that the turn had to compute"
    assert await pool.load("preheats_unused") == 0
