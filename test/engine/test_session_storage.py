"""Sessions beyond pool and host are loaded from a file, or computed again.

There are also fewer request rows than sessions.
"""

import asyncio
import os
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_live.messages import TruncateSession, UserSpeaking
from test.engine.conftest import IS_NIGHTLY, running_stages
from test.engine.small_pool import Pool, check

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POOL_TOKENS = 512
N_SESSIONS = 30
N_ROWS = 12
HEADER = list(range(10, 42))  # common to all sessions
PROMPT_TOKENS = 60
POLICIES = ("urgency", "pacing", "truncate", "retention", "next-use", "preload")
HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 1.5}
VARIANTS = {"page-1": (1, True), "page-16-no-overlap": (16, False)}


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=VARIANTS.values(), ids=VARIANTS.keys()
)
async def stages(request, endless_checkpoint, tmp_path_factory):
    page, overlap = request.param
    args = {
        "page_size": page,
        "max_total_tokens": POOL_TOKENS,
        "disable_overlap_schedule": not overlap,
        "max_running_requests": N_ROWS,
    }
    directory = tmp_path_factory.mktemp("storage")
    running = running_stages(
        endless_checkpoint,
        tmp_path_factory.mktemp("session-storage"),
        args,
        policies=POLICIES,
        thinker_args=HOST,
        session_storage=f"{1 << 30}:{directory}",
        names=("thinker",),
    )
    async with running as found:
        found.storage_dir = directory
        yield found


@pytest.fixture
def pool(stages) -> Pool:
    return Pool(stages)


class Talks:
    """Sessions that take turns one after the other."""

    def __init__(self, pool: Pool, prefix: str):
        self._pool = pool
        self.names = [f"{prefix}-{n}" for n in range(N_SESSIONS)]
        self._heard: dict[str, list[int]] = {name: [] for name in self.names}
        self._said: dict[str, list[tuple[int, float]]] = {name: [] for name in self.names}

    async def begin(self) -> None:
        for n, name in enumerate(self.names):
            await self._pool.open(name)
            await self._read_header(name)
            await self.turn(name, [10 + (7 * n + i) % 180 for i in range(PROMPT_TOKENS)])

    async def _read_header(self, name: str) -> None:
        body = {
            "input_ids": HEADER,
            "session_params": {"id": name},
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        }
        await self._pool.post("/generate", body)
        self._heard[name] += HEADER

    async def turn(self, name: str, new: list[int]) -> None:
        heard, said = self._heard[name], self._said[name]
        heard += new
        for token, logprob in await self._pool.say(name, new, 4):
            said.append((len(heard), logprob))
            heard.append(token)

    async def end(self, reference) -> None:
        for name in self.names:
            check(reference, self._heard[name], self._said[name])
            await self._pool.close(name)
        for tier in ("kv_tokens_used", "policy_tokens_on_host", "policy_tokens_in_storage"):
            assert await self._pool.load(tier) == 0


def stored_file(directory: Path) -> Path:
    """The engine's open file, which has no name."""
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(fd)
        except OSError:
            continue  # a process that has ended, or of another user
        if target.startswith(f"{directory}/"):
            return fd
    raise AssertionError("no engine has a file there")


async def test_sessions_loaded_from_storage_continue_with_equal_tokens(pool, reference):
    talks = Talks(pool, "stored")
    await talks.begin()
    assert await pool.load("policy_tokens_in_storage") > POOL_TOKENS
    for n, name in enumerate(talks.names):
        if n % 2:
            pool.feed.send(UserSpeaking(name))
            await asyncio.sleep(0.05 * (n % 3))
        await talks.turn(name, [20 + n, 30, 40])
    assert await pool.load("policy_tokens_fetched") > POOL_TOKENS
    assert await pool.load("policy_pages_damaged") == 0
    await talks.end(reference)


async def test_damaged_pages_are_computed_again(stages, pool, reference):
    talks = Talks(pool, "damaged")
    await talks.begin()
    assert await pool.load("policy_tokens_in_storage") > POOL_TOKENS
    with stored_file(stages.storage_dir).open("r+b") as file:
        n_bytes = file.seek(0, os.SEEK_END)
        for at in range(0, n_bytes, 1000):
            file.seek(at)
            file.write(b"\x00\xff")
    for n, name in enumerate(talks.names):
        await talks.turn(name, [20 + n, 30, 40])
    assert await pool.load("policy_pages_damaged") > 0
    await talks.end(reference)


async def test_a_session_may_close_while_its_tail_is_loading(pool, reference):
    talks = Talks(pool, "gone")
    await talks.begin()
    for name in talks.names[::2]:
        pool.feed.send(UserSpeaking(name))
        await pool.close(name)
    talks.names = talks.names[1::2]
    for name in talks.names:
        await talks.turn(name, [20, 30])
    await talks.end(reference)


# --- random events in random order ---


class Client:
    """heard: all tokens of its session. said: (position, log-probability) of response tokens."""

    _n_sessions = 0

    def __init__(self, pool: Pool):
        self._pool = pool
        self.name = ""
        self.heard: list[int] = []
        self.said: list[tuple[int, float]] = []
        self.whole = True  # its last request was not aborted

    async def open(self) -> None:
        Client._n_sessions += 1
        self.name, self.heard, self.said = f"client-{Client._n_sessions}", [], []
        await self._pool.open(self.name)

    async def ask(self, n: int, n_response: int, rid: str | None = None) -> dict:
        """Run a turn. Returns SGLang's meta_info."""
        new = [10 + (7 * n + i) % 180 for i in range(5 + n % 50)]
        body = {
            "rid": rid,
            "input_ids": new,
            "session_params": {"id": self.name},
            "sampling_params": {"max_new_tokens": n_response, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
        }
        meta = (await self._pool.post("/generate", body)).json()["meta_info"]
        self.whole = meta["finish_reason"]["type"] != "abort"
        if self.whole:
            self.heard += new
            for logprob, token, _ in meta["output_token_logprobs"]:
                self.said.append((len(self.heard), logprob))
                self.heard.append(token)
        return meta

    # --- steps: each takes a random number for its choices ---

    async def say(self, n: int, reference) -> None:
        await self.ask(n, 2 + n % 9)

    async def speak(self, n: int, reference) -> None:
        self._pool.feed.send(UserSpeaking(self.name))
        await asyncio.sleep(0.02 * (n % 4))

    async def truncate(self, n: int, reference) -> None:
        if not self.said or not self.whole:
            return
        # The newest token is computed by the next request.
        first = self.said[0][0]
        kept = first + n % (len(self.heard) - first)
        self._pool.feed.send(TruncateSession(self.name, kept))
        await asyncio.sleep(0.2)  # it is sent on another socket than the request
        del self.heard[kept:]
        self.said = [(at, logprob) for at, logprob in self.said if at < kept]

    async def abort(self, n: int, reference) -> None:
        rid = f"{self.name}-{n}-{len(self.heard)}"
        asking = asyncio.create_task(self.ask(n, 100, rid))
        await asyncio.sleep(0.02 * (n % 6))
        await self._pool.post("/abort_request", {"rid": rid})
        await asking

    async def hang_up(self, n: int, reference) -> None:
        """Close the session in the middle of a response."""
        check(reference, self.heard, self.said)
        new = [10 + (7 * n + i) % 180 for i in range(5 + n % 50)]
        async with self._pool.saying(self.name, new, 60):
            await asyncio.sleep(0.02 * (n % 6))
            await self._pool.close(self.name)
        await self.open()

    async def close(self, n: int, reference) -> None:
        check(reference, self.heard, self.said)
        await self._pool.close(self.name)
        await self.open()


STEP = st.tuples(
    st.sampled_from(
        ("say", "say", "say", "speak", "speak", "truncate", "abort", "hang_up", "close")
    ),
    st.lists(st.integers(0, 19), min_size=1, max_size=4, unique=True),
    st.integers(0, 999),
)


@settings(
    max_examples=4 if IS_NIGHTLY else 2,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(STEP, min_size=30, max_size=50))
async def test_sessions_keep_their_tokens_in_any_order_of_events(pool, reference, steps):
    """Twenty clients, up to four of them at once."""
    clients = [Client(pool) for _ in range(20)]
    for n, client in enumerate(clients):
        await client.open()
        await client.say(n, reference)
    for step, who, n in steps:
        await asyncio.gather(*(getattr(clients[i], step)(n + i, reference) for i in who))
    for client in clients:
        await client.say(7, reference)
        check(reference, client.heard, client.said)
        await pool.close(client.name)
    for tier in ("kv_tokens_used", "policy_tokens_on_host", "policy_tokens_in_storage"):
        assert await pool.load(tier) == 0


# --- the end of an engine ---


async def test_an_engine_killed_while_storing_leaves_no_file(stages, pool, reference):
    replica, before = stages.replica("thinker"), await pool.load("policy_tokens_stored")
    talking = asyncio.create_task(Talks(pool, "killed").begin())
    async with asyncio.timeout(30):
        while await pool.load("policy_tokens_stored") == before:
            pass
    replica.process.kill()
    with pytest.raises(httpx.HTTPError):
        await talking
    async with asyncio.timeout(90):
        while replica.n_starts < 2 or not replica.is_up:
            await asyncio.sleep(0.1)
    assert list(stages.storage_dir.iterdir()) == []
    talks = Talks(pool, "after")
    await talks.begin()
    for name in talks.names:
        await talks.turn(name, [20, 30])
    await talks.end(reference)
