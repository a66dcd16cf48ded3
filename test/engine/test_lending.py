"""Idle sessions of a thinker in pages of a running talker are loaded unchanged at any time.

The talker speaks meanwhile, which makes it recall pages; its codes stay the same. Every token of
the thinker is compared with a float32 reference, which neither evicts nor lends. The borrower
overwrites slots with NaN when a copy is dropped, and pages before it returns them: a read of what
another session, or the borrower, has left changes the tokens.
"""

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from lab import lending, round_log
from lab.attachment import joined
from lab.cpu_graphs.attach import environment as decode_graphs
from lab.poison import POISON
from sglang_live.extensions.lending.broker import LeaseBroker
from sglang_live.extensions.lending.channel import lease_socket
from sglang_live.extensions.lending.lending import LENDER, Lending
from sglang_live.extensions.lending.policy import LeaseConfig
from test.engine.conftest import Stages, running_stages
from test.engine.gauges import load_of, until
from test.engine.random_load import compared, settled
from test.engine.random_talk import Talk
from test.engine.small_pool import Pool
from test.engine.speakers import Speech

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POOL_TOKENS, LENDER_TOKENS = 1024, 16_384
POLICIES = ("urgency", "pacing", "truncate", "retention", "next-use", "preload")
# So small a host that sessions which are not in lent pages are lost.
HOST = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 1.5,
    "max_total_tokens": POOL_TOKENS,
    "max_running_requests": 64,
}
# The reserve has room for one response, but not for two: a second recalls. Many small leases.
LENDING = lending.environment(
    window_s=4.0, calm_s=0.5, cached_share=0.0, future_tokens=3900, n_runs=64
)
VARIANTS = {
    "page-1": (1, True, "", {}, 1),
    "page-16-no-overlap-slow-link": (16, False, "slow_link", {}, 1),
    "graphs": (1, True, "", decode_graphs((1, 2, 4)), 1),
    # Ranks queue on one link: a transfer ends at another time on each.
    "two-ranks-slow-link": (1, True, "slow_link", {}, 2),
}
# Of open files: lenders' memory, tables, partners, bells.
KINDS = ("memfd:sglang_live-kv", "memfd:sglang_live-leases", "pidfd", "eventfd")


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=VARIANTS.values(), ids=VARIANTS.keys()
)
async def stages(request, endless_checkpoint, tmp_path_factory):
    page, overlap, device_model, graphs, n_ranks = request.param
    logs = tmp_path_factory.mktemp("rounds")
    common = graphs | (round_log.environment(logs) if n_ranks > 1 else {})
    running = running_stages(
        endless_checkpoint,
        tmp_path_factory.mktemp("lending"),
        {"page_size": page, "disable_overlap_schedule": not overlap, "tp_size": n_ranks},
        talker_environment=joined(LENDING, common),
        thinker_environment=joined(POISON, lending.POISON, common),
        policies=POLICIES,
        thinker_args=HOST,
        talker_args={"max_total_tokens": LENDER_TOKENS},
        device_model=device_model,
        additions=(Lending(LeaseConfig(roles={"thinker": "borrow", "talker": "lend"})),),
        names=("thinker", "talker"),
    )
    gc.collect()
    before = lease_files("self", KINDS[:-1])
    async with running as found:
        found.logs, found.n_ranks = logs, n_ranks
        yield found
    # The stages have ended; the broker was in this process.
    gc.collect()
    assert len(lease_files("self", KINDS[:-1])) <= len(before)


@pytest.fixture
def pool(stages) -> Pool:
    return Pool(stages)


def lease_files(process: int | str, kinds: tuple[str, ...]) -> list[str]:
    """The kind of each open file of a process that is of one of these kinds."""
    names = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of iterdir() itself
            names.append(os.readlink(link))
    return sorted(kind for name in names for kind in kinds if kind in name)


def scheduler_pid(stages: Stages, role: str, rank: int = 0) -> int:
    broker = stages.additions[0].broker
    engines = [engine for engine in broker._engines if engine.role == role]
    (engine,) = [engine for engine in engines if engine.rank == rank]
    return engine.pid


async def lends(stages: Stages) -> None:
    """Wait until the thinker has pages of the talker."""
    await until(stages, "thinker", "policy_leases_held", lambda n: n >= 20)


async def check_all_is_free(stages: Stages) -> None:
    for name in ("kv_tokens_used", "policy_tokens_idle", "policy_tokens_on_host"):
        await until(stages, "thinker", name, lambda n: n == 0)
    await until(stages, "thinker", "policy_peer_tokens", lambda n: n == 0)
    load = await load_of(stages, "thinker")
    assert load["policy_peer_slots_free"] == load["policy_peer_slots"]
    # An engine whose idle pool lacks a slot ends, and is started again.
    await until(stages, "talker", "kv_tokens_used", lambda n: n == 0)


async def test_sessions_in_lent_pages_continue_with_equal_tokens(stages, pool, reference):
    """Pages are recalled at any moment, because the talker speaks; then it needs more of them."""
    speech = Speech(stages)
    await speech.learn()
    await lends(stages)
    engines = {role: scheduler_pid(stages, role) for role in ("lend", "borrow")}
    talk = Talk(pool, "session", 20, 7)
    await talk.begin()
    async with speech.going_on():
        for _ in range(60):
            await talk.step(reference)
    thinker, talker = await load_of(stages, "thinker"), await load_of(stages, "talker")
    assert thinker["policy_peer_tokens_written"] > POOL_TOKENS
    assert thinker["policy_peer_tokens_loaded"] + thinker["policy_peer_tokens_preloaded"] > 0
    assert speech.n_spoken > 3 and speech.n_wrong == 0
    returned = talker["policy_leases_returned"]
    async with speech.going_on(3):
        await until(stages, "talker", "policy_leases_returned", lambda n: n > returned)
    assert speech.n_wrong == 0
    await talk.end(reference)
    await check_all_is_free(stages)
    assert engines == {role: scheduler_pid(stages, role) for role in engines}
    await check_ranks_agree(stages)


async def check_ranks_agree(stages: Stages) -> None:
    """That all ranks have decided alike in every round since the start."""
    if stages.n_ranks > 1:
        await settled(stages.logs)
        for name in ("thinker", "talker"):
            assert compared(stages.logs, name) > 100


async def test_tenants_bytes_stay_their_own(stages, pool, reference):
    """Of sessions in lent pages nothing is left there when the borrower has ended, be it killed.

    Until then slots change hands between sessions, and a read of another's would change tokens.
    """
    await lends(stages)
    # The talker's own KV, and what earlier sessions left in pages that are still lent.
    before = units_in(memory_of_lender(stages))
    files = lease_files(scheduler_pid(stages, "lend"), KINDS)
    one, other = Talk(pool, "tenant", 16, 13), Talk(pool, "other-tenant", 16, 14)
    await one.begin()
    await until(stages, "thinker", "policy_peer_tokens", lambda n: n > 200)
    await other.begin()
    found = units_in(memory_of_lender(stages)) - before
    assert found
    for mine, theirs in zip(one.names, other.names, strict=True):
        await one.turn(mine)
        await one.close(mine, reference)
        await other.turn(theirs)
    await other.end(reference)
    await check_all_is_free(stages)
    speech = Speech(stages)
    await speech.learn()
    n_starts = stages.replica("thinker").n_starts
    os.kill(scheduler_pid(stages, "borrow", stages.n_ranks - 1), signal.SIGKILL)
    await until(stages, "talker", "policy_borrowers_lost", lambda n: n > 0)
    await until(stages, "talker", "policy_tokens_lent", lambda n: n == 0)
    assert not found & units_in(memory_of_lender(stages))
    await restarted(stages, n_starts)
    await lends(stages)
    again = Speech(stages)
    await again.learn()
    assert np.array_equal(again.codes, speech.codes)
    assert lease_files(scheduler_pid(stages, "lend"), KINDS) == files
    await check_all_is_free(stages)


async def restarted(stages: Stages, n_starts: int) -> None:
    """Wait until the thinker has been started again.

    It reports its last values until it has noticed its scheduler's death.
    """
    thinker = stages.replica("thinker")
    async with asyncio.timeout(120):
        while thinker.n_starts == n_starts or not thinker.is_up:
            await asyncio.sleep(0.1)


def memory_of_lender(stages: Stages) -> bytes:
    for link in Path(f"/proc/{scheduler_pid(stages, 'lend')}/fd").iterdir():
        if "memfd:sglang_live-kv" in os.readlink(link):
            return link.read_bytes()
    raise AssertionError("the lender has no shared memory")


def units_in(memory: bytes) -> set[bytes]:
    """The different pieces of 64 bytes in a memory, without plain ones such as zeros and NaN."""
    rows = np.frombuffer(memory, np.uint8).reshape(-1, 64)
    varied = rows[rows.any(axis=1) & (rows != rows[:, :1]).any(axis=1)]
    return {row.tobytes() for row in varied}


async def test_a_stopped_engine_does_not_stop_the_other(stages, pool, reference):
    """A stopped borrower returns recalled pages when it runs again; until then the lender's
    reserve is enough for a response.
    """
    speech = Speech(stages)
    await speech.learn()
    await lends(stages)
    talk = Talk(pool, "goes-on", 16, 23)
    await talk.begin()
    with stopped(scheduler_pid(stages, "lend")):
        for name in talk.names:
            await talk.turn(name)
    async with speech.speaker("awake") as one, speech.speaker("too") as other:
        with stopped(scheduler_pid(stages, "borrow")):
            for codes in await asyncio.gather(one(), other()):
                speech.check(codes)
            speech.check(await one())
    assert speech.n_wrong == 0
    for name in talk.names:
        await talk.turn(name)
    await until(stages, "talker", "policy_leases_state_recalled", lambda n: n == 0)
    await talk.end(reference)
    await check_all_is_free(stages)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_sessions_outlive_the_broker_and_a_killed_lender(stages, pool, reference):
    """Without a broker the pair goes on; another broker introduces the next lender."""
    await lends(stages)
    talk = Talk(pool, "outlives", 16, 31)
    await talk.begin()
    pair = stages.additions[0]
    pair.broker.stop()
    for name in talk.names:
        await talk.turn(name)
    broker = pair.broker = LeaseBroker()
    broker.start(lease_socket(Path(pool.spec.run_dir)))
    async with asyncio.timeout(30):
        n_ranks = 2 * stages.n_ranks
        while len([engine for engine in broker._engines if engine.message]) < n_ranks:
            await asyncio.sleep(0.1)
    assert broker.counts["introduced"] == 0
    await until(stages, "thinker", "policy_peer_tokens", lambda n: n > 200)
    # With one rank its lender has ended; SGLang ends the others.
    os.kill(scheduler_pid(stages, "lend", stages.n_ranks - 1), signal.SIGKILL)
    for name in talk.names:
        await talk.turn(name)
    await until(stages, "thinker", "policy_lenders_lost", lambda n: n > 0)
    await until(stages, "thinker", "policy_tokens_in_dead_lenders", lambda n: n == 0)
    # Its memory is unmapped.
    await until(stages, "thinker", "policy_peer_lenders", lambda n: n <= 1)
    assert len(maps_of_lenders(scheduler_pid(stages, "borrow"))) <= 1
    await until(stages, "talker", "policy_tokens_lent", lambda n: n > 0, within_s=120)
    await lends(stages)
    assert broker.counts["introduced"] == 1
    for _ in range(10):
        await talk.step(reference)
    await talk.end(reference)
    await check_all_is_free(stages)


def maps_of_lenders(pid: int) -> set[str]:
    """Inodes of lenders' memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:sglang_live-kv" in line}


async def test_a_flush_empties_lent_pages_and_keeps_the_leases(stages, pool, reference):
    await lends(stages)
    talk = Talk(pool, "flushed", 16, 37)
    await talk.begin()
    await until(stages, "thinker", "policy_peer_tokens", lambda n: n > 0)
    held = (await load_of(stages, "thinker"))["policy_leases_held"]
    for name in talk.names:
        await talk.close(name, reference)
    await pool.post("/flush_cache", {})
    await until(stages, "thinker", "policy_peer_tokens", lambda n: n == 0)
    load = await load_of(stages, "thinker")
    assert load["policy_peer_slots_free"] == load["policy_peer_slots"] > 0
    assert load["policy_leases_held"] >= held - 1
    again = Talk(pool, "after-the-flush", 16, 41)
    await again.begin()
    await again.end(reference)
    await check_all_is_free(stages)


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=(1, 2), ids=("one-rank", "two-ranks")
)
async def beside_memory(request, endless_checkpoint, tmp_path_factory):
    """A thinker that borrows from a process without an engine."""
    borrows = LeaseConfig(roles={"thinker": "borrow"}, lent_bytes=request.param << 28)
    running = running_stages(
        endless_checkpoint,
        tmp_path_factory.mktemp("lender"),
        {"tp_size": request.param},
        thinker_environment=joined(POISON, lending.POISON),
        policies=POLICIES,
        thinker_args=HOST,
        additions=(Lending(borrows),),
        names=("thinker",),
    )
    async with running as found:
        yield found


async def test_sessions_live_in_the_memory_of_a_process_without_an_engine(beside_memory, reference):
    """Also when it is killed; the process that replaces it lends new memory."""
    lender = beside_memory.replica(LENDER)
    await until(beside_memory, LENDER, "leases_state_active", lambda n: n == 4)
    talk = Talk(Pool(beside_memory), "lent", 20, 43)
    await talk.begin()
    for _ in range(20):
        await talk.step(reference)
    await until(beside_memory, "thinker", "policy_peer_tokens", lambda n: n > 200)
    assert (await load_of(beside_memory, LENDER))["lent_bytes_resident"] > 0
    assert lender.process is not None
    os.kill(lender.process.pid, signal.SIGKILL)
    for name in talk.names:
        await talk.turn(name)
    await until(beside_memory, "thinker", "policy_lenders_lost", lambda n: n == 1)
    await until(beside_memory, "thinker", "policy_tokens_in_dead_lenders", lambda n: n == 0)
    await until(beside_memory, LENDER, "leases_state_active", lambda n: n == 4)
    for _ in range(20):
        await talk.step(reference)
    load = await load_of(beside_memory, "thinker")
    assert load["policy_peer_tokens_loaded"] + load["policy_peer_tokens_preloaded"] > 0
    await talk.end(reference)
    await until(beside_memory, "thinker", "policy_peer_tokens", lambda n: n == 0)


async def test_a_lender_without_an_engine_frees_a_dead_borrowers_memory(beside_memory, reference):
    talk = Talk(Pool(beside_memory), "dead", 16, 47)
    await talk.begin()
    await until(beside_memory, "thinker", "policy_peer_tokens", lambda n: n > 200)
    n_starts = beside_memory.replica("thinker").n_starts
    n_lost = (await load_of(beside_memory, LENDER))["borrowers_lost"]
    os.kill(scheduler_pid(beside_memory, "borrow"), signal.SIGKILL)
    await until(beside_memory, LENDER, "borrowers_lost", lambda n: n == n_lost + 1)
    assert (await load_of(beside_memory, LENDER))["lent_bytes_resident"] == 0
    await restarted(beside_memory, n_starts)
    await until(beside_memory, LENDER, "leases_state_active", lambda n: n == 4)
    assert beside_memory.replica(LENDER).n_starts == 2, "it was killed once, by the test before"
    again = Talk(Pool(beside_memory), "again", 16, 53)
    await again.begin()
    await again.end(reference)
