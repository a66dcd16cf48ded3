"""The runner: which lines run, how they end, and what a stop or a full disk does to them."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.database import StorageFullError
from sglang_live.extensions.batches.in_process import Outcome
from sglang_live.extensions.batches.line_run import LineRuns
from sglang_live.extensions.batches.metrics import BatchMetrics
from sglang_live.extensions.batches.pace import Load, lines_at_once
from sglang_live.extensions.batches.records import (
    CANCELLED,
    COMPLETED,
    ENDED,
    EXPIRED,
    FAILED,
    IN_PROGRESS,
    Batch,
)
from sglang_live.extensions.batches.runner import KEY_STORAGE_FULL, STORAGE_FULL, Runner
from sglang_live.extensions.batches.store import Store
from sglang_live.gateway.draining import Drain

from .batches import URL, FakeTime, input_of, uploaded

_PATIENCE_S = 15.0
CONFIG = BatchConfig(at_once=3, retry_s=0.02, suspect_s=0.01)


class FakeExecute:
    """Serves lines by the name in their body; each waits for `gate`.

    outcomes: of each name, one after the other; then 200.
    """

    def __init__(self):
        self.outcomes: dict[str, list[Outcome]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[tuple[str, str]] = []  # key, name
        self.n_running = self.n_most = 0

    async def __call__(self, key: str, path: str, body: bytes, until_s: int) -> Outcome:
        name = json.loads(body)["input"]
        self.asked.append((key, name))
        self.n_running += 1
        self.n_most = max(self.n_most, self.n_running)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
        finally:
            self.n_running -= 1
        left = self.outcomes.get(name, [])
        return left.pop(0) if left else Outcome(200, {"said": name})

    def names(self) -> list[str]:
        return [name for _, name in self.asked]


class World:
    def __init__(self, folder, keys=("k",), config=CONFIG):
        self.time, self.execute, self.drain = FakeTime(), FakeExecute(), Drain()
        self.load, self.registry = Load(n_sessions=0, n_more=8), CollectorRegistry()
        self.store = Store(folder, config, self.time)
        metrics = BatchMetrics(self.registry)
        retried = lambda code: metrics.retries.labels(code).inc()  # noqa: E731
        self.runner = Runner(
            self.store,
            LineRuns(self.execute, config, retried),
            keys=keys,
            check_model=lambda name: None,
            load=lambda: self.load,
            drain=self.drain,
            metrics=metrics,
        )

    def owner(self, key: str = "k") -> str:
        return self.store.owner_of(key)

    async def create(self, names, key: str = "k") -> str:
        lines = [
            {"custom_id": name, "method": "POST", "url": URL, "body": {"input": name}}
            for name in names
        ]
        data = "\n".join(map(json.dumps, lines)).encode() or b"{}"
        return await self.create_of(data, key)

    async def create_of(self, data: bytes, key: str = "k") -> str:
        file = await self.store.run(uploaded, self.store, self.owner(key), data)
        batch = await self.store.run(
            self.store.batches.create,
            owner=self.owner(key),
            endpoint=URL,
            input_file=file.id,
            metadata=None,
            results_kept_s=None,
        )
        self.runner.wake()
        return batch.id

    async def get(self, batch_id: str, key: str = "k") -> Batch:
        return await self.store.run(self.store.batches.get, self.owner(key), batch_id)

    async def until(self, batch_id: str, claim, key: str = "k") -> Batch:
        async with asyncio.timeout(_PATIENCE_S):
            while not claim(batch := await self.get(batch_id, key)):
                await asyncio.sleep(0.005)
            return batch

    async def ended(self, batch_id: str, key: str = "k") -> Batch:
        return await self.until(batch_id, lambda batch: batch.status in ENDED, key)

    def results(self, batch: Batch) -> dict[str, dict]:
        """By custom_id."""
        found = {}
        for file_id in (batch.output_file, batch.error_file):
            path = self.store.files.path(file_id)
            for line in path.read_bytes().splitlines() if path.exists() else ():
                result = json.loads(line)
                assert result["custom_id"] not in found
                found[result["custom_id"]] = result
        return found

    def metric(self, name: str, **labels) -> float:
        return self.registry.get_sample_value(f"sglang_live_batch_{name}", labels) or 0.0


@asynccontextmanager
async def running(folder, **options):
    world = World(folder, **options)
    world.runner.start()
    yield world
    await world.runner.close()


def error(status: int, code: str = "") -> Outcome:
    return Outcome(status, {"error": {"code": code}}, code)


async def test_a_batch_runs_to_its_end(tmp_path):
    async with running(tmp_path) as world:
        world.execute.outcomes["b"] = [error(400, "invalid_value")]
        batch = await world.ended(await world.create("abcde"))
        results = world.results(batch)
        assert (batch.status, batch.n_completed, batch.n_failed) == (COMPLETED, 4, 1)
        assert results["a"]["response"]["body"] == {"said": "a"} and results["a"]["error"] is None
        assert results["a"]["response"]["status_code"] == 200
        assert results["b"]["response"]["status_code"] == 400
        assert list(batch.moments) == ["in_progress", "finalizing", "completed"]
        assert Counter(world.execute.names()) == Counter("abcde")
        assert world.execute.n_most <= CONFIG.at_once
        assert world.metric("lines_total", outcome="completed") == 4
        assert world.metric("lines_total", outcome="failed") == 1
        assert world.metric("ended_total", status=COMPLETED) == 1


async def test_an_invalid_input_fails_its_batch_and_no_line_runs(tmp_path):
    async with running(tmp_path) as world:
        batch = await world.ended(await world.create_of(input_of(["a", "b", "a"])))
        assert batch.status == FAILED and not world.execute.asked
        [fault] = batch.faults
        assert (fault["line"], fault["code"]) == (3, "duplicate_custom_id")


async def test_lines_wait_where_no_session_is_free(tmp_path):
    async with running(tmp_path) as world:
        world.load = Load(n_sessions=8, n_more=0)
        id = await world.create("ab")
        await world.until(id, lambda batch: batch.status == IN_PROGRESS)
        await asyncio.sleep(0.05)
        assert not world.execute.asked
        world.load = Load(n_sessions=7, n_more=1)
        world.runner.wake()
        await world.ended(id)
        assert world.execute.n_most == 1


@pytest.mark.parametrize(
    ("n_sessions", "n_more", "n_lines"),
    [(0, 64, 8), (0, 1, 8), (16, 48, 6), (32, 32, 4), (63, 1, 1), (64, 0, 0), (0, 0, 0)],
)
def test_the_free_share_of_the_sessions_decides_the_pace(n_sessions, n_more, n_lines):
    assert lines_at_once(Load(n_sessions=n_sessions, n_more=n_more), 8, 0, 0) == n_lines


async def test_keys_have_equal_shares(tmp_path):
    async with running(tmp_path, keys=("k", "l")) as world:
        world.execute.gate.clear()
        many = await world.create([f"k{n}" for n in range(20)])
        await world.until(many, lambda batch: len(world.execute.asked) == CONFIG.at_once)
        few = await world.create(["l1", "l2"], key="l")
        await world.until(few, lambda batch: batch.status == IN_PROGRESS, key="l")
        world.execute.gate.set()
        await world.ended(few, key="l")
        await world.ended(many)
        assert max(world.execute.names().index(name) for name in ("l1", "l2")) < 9
        assert {key for key, name in world.execute.asked if name[0] == "l"} == {"l"}


async def test_a_batch_without_its_key_waits_until_the_server_has_it_again(tmp_path):
    async with running(tmp_path, keys=("k",)) as world:
        id = await world.create("ab")
        await world.until(id, lambda batch: batch.status == IN_PROGRESS or batch.n_lines == 0)
    async with running(tmp_path, keys=("other",)) as world:
        await asyncio.sleep(0.1)
        assert not world.execute.asked
    async with running(tmp_path, keys=("other", "k")) as world:
        assert (await world.ended(id)).n_completed == 2


@pytest.mark.parametrize("refusal", [error(503, "stage_unavailable"), error(429, "rate_limit")])
async def test_a_line_waits_as_long_as_the_server_refuses_it(tmp_path, refusal):
    async with running(tmp_path) as world:
        world.execute.outcomes["a"] = [refusal] * 6
        batch = await world.ended(await world.create("a"))
        assert batch.n_completed == 1 and len(world.execute.asked) == 7
        assert world.metric("line_retries_total", code=refusal.code) == 6


async def test_a_line_that_fails_by_the_server_is_tried_three_times(tmp_path):
    async with running(tmp_path) as world:
        world.execute.outcomes |= {
            "a": [error(500)] * 2,
            "b": [error(504, "deadline_exceeded")] * 9,
        }
        batch = await world.ended(await world.create("ab"))
        assert Counter(world.execute.names()) == {"a": 3, "b": 3}
        results = world.results(batch)
        assert results["a"]["response"]["status_code"] == 200
        assert results["b"]["response"]["status_code"] == 504


async def test_a_line_that_ends_the_engine_twice_is_not_tried_again(tmp_path):
    async with running(tmp_path) as world:
        suspect = error(400, "refused_after_engine_death")
        died = error(503, "stage_unavailable")
        world.execute.outcomes["poison"] = [died, suspect, suspect, died, suspect, suspect]
        world.execute.outcomes["beside"] = [died, suspect, suspect]
        batch = await world.ended(await world.create(["poison", "beside"]))
        assert world.execute.names().count("poison") == 5
        assert (batch.n_completed, batch.n_failed) == (1, 1)
        results = world.results(batch)
        assert results["poison"]["response"]["body"]["error"]["code"] == suspect.code
        assert results["beside"]["response"]["status_code"] == 200


async def test_a_bug_is_the_error_of_its_line_alone(tmp_path):
    async with running(tmp_path) as world:
        whole = world.execute.__call__

        async def crash(key: str, path: str, body: bytes, until_s: int) -> Outcome:
            if b'"a"' in body:
                raise RuntimeError("a bug")
            return await whole(key, path, body, until_s)

        world.runner._lines.execute = crash
        batch = await world.ended(await world.create("ab"))
        assert (batch.n_completed, batch.n_failed) == (1, 1)
        assert world.results(batch)["a"]["response"]["status_code"] == 500


async def test_a_line_has_a_limit_of_time(tmp_path):
    config = BatchConfig(at_once=3, line_s=0.05)
    async with running(tmp_path, config=config) as world:
        world.execute.gate.clear()
        batch = await world.ended(await world.create("a"))
        result = world.results(batch)["a"]
        assert result["response"] is None and result["error"]["code"] == "request_timeout"


async def test_a_cancelled_batch_keeps_the_results_of_running_lines(tmp_path):
    async with running(tmp_path) as world:
        world.execute.gate.clear()
        id = await world.create([str(n) for n in range(2500)])
        await world.until(id, lambda batch: len(world.execute.asked) == CONFIG.at_once)
        await world.store.run(world.store.batches.cancel, world.owner(), id)
        world.runner.wake()
        await asyncio.sleep(0.05)
        assert (await world.get(id)).status == "cancelling"
        world.execute.gate.set()
        batch = await world.ended(id)
        assert batch.status == CANCELLED and len(world.execute.asked) == CONFIG.at_once
        assert (batch.n_completed, batch.n_failed) == (3, 2497)
        unrun = world.results(batch)["99"]
        assert unrun["response"] is None and unrun["error"]["code"] == "batch_cancelled"
        assert world.metric("lines_total", outcome="cancelled") == 2497


async def test_a_batch_expires_with_the_results_that_it_has(tmp_path):
    async with running(tmp_path) as world:
        id = await world.create("abcde")
        world.load = Load(n_sessions=0, n_more=0)
        world.time.now += CONFIG.window_s - 1
        await asyncio.sleep(0.05)
        world.load = Load(n_sessions=0, n_more=8)
        world.execute.gate.clear()
        world.runner.wake()
        await world.until(id, lambda batch: len(world.execute.asked) >= CONFIG.at_once)
        world.time.now += 1
        world.runner.wake()
        batch = await world.ended(id)
        assert batch.status == EXPIRED and batch.n_failed == 5 and world.execute.n_running == 0
        assert {r["error"]["code"] for r in world.results(batch).values()} == {"batch_expired"}


async def test_a_stop_stores_what_is_done_and_a_start_goes_on(tmp_path):
    async with running(tmp_path) as world:
        world.execute.outcomes["b"] = [error(503)] * 1000
        id = await world.create("abcdef")
        await world.until(id, lambda batch: batch.n_completed == 5)
    async with running(tmp_path) as world:
        batch = await world.ended(id)
        assert world.execute.names() == ["b"] and batch.n_completed == 6
        assert set(world.results(batch)) == set("abcdef")


async def test_a_drain_starts_no_line_and_waits_for_those_that_run(tmp_path):
    async with running(tmp_path) as world:
        world.execute.gate.clear()
        id = await world.create("abcdef")
        await world.until(id, lambda batch: len(world.execute.asked) == CONFIG.at_once)
        world.drain.began.set()
        quiet = asyncio.create_task(world.drain.until_quiet())
        await asyncio.sleep(0.02)
        assert not quiet.done()
        world.execute.gate.set()
        async with asyncio.timeout(_PATIENCE_S):
            await quiet
        batch = await world.until(id, lambda batch: batch.n_completed == CONFIG.at_once)
        assert len(world.execute.asked) == CONFIG.at_once and batch.status == IN_PROGRESS


async def test_a_line_during_which_servers_end_again_and_again_fails(tmp_path):
    id = ""
    for n in range(CONFIG.max_attempts):
        world = World(tmp_path)
        world.execute.gate.clear()
        world.runner.start()
        id = id or await world.create("a")
        await world.until(id, lambda batch, world=world: bool(world.execute.asked))
        await kill(world)
        assert n < CONFIG.max_attempts
    async with running(tmp_path) as world:
        batch = await world.ended(id)
        assert not world.execute.asked
        assert world.results(batch)["a"]["error"]["code"] == "server_error"


async def kill(world: World) -> None:
    """End a runner without any of what it does at a stop."""
    tasks = [t for begun in world.runner._begun.values() for t in begun.running.values()]
    tasks.append(world.runner._loop)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    world.store.close()


async def test_a_full_disk_pauses_all_batches_and_they_go_on_by_themselves(tmp_path, monkeypatch):
    async with running(tmp_path) as world:
        id = await world.create("abcdefgh")
        record, full = world.store.batches.record, True

        def fails(batch_id, results):
            if full:
                raise StorageFullError
            record(batch_id, results)

        monkeypatch.setattr(world.store.batches, "record", fails)
        batch = await world.until(id, lambda batch: world.runner.paused(batch) == STORAGE_FULL)
        assert batch.to_json("m", STORAGE_FULL)["paused"] == STORAGE_FULL
        await asyncio.sleep(0.1)
        n_asked = len(world.execute.asked)
        assert n_asked <= 2 * CONFIG.at_once and world.metric("paused", reason=STORAGE_FULL) == 1
        full = False
        batch = await world.ended(id)
        assert batch.n_completed == 8 and world.runner.paused(batch) is None
        assert Counter(world.execute.names()) == Counter("abcdefgh"), "no line ran twice"


async def test_a_key_whose_storage_is_full_pauses_until_it_deletes_files(tmp_path):
    config = BatchConfig(at_once=1, max_key_bytes=3000)
    async with running(tmp_path, config=config, keys=("k", "l")) as world:
        big = await world.store.run(uploaded, world.store, world.owner(), b"x" * 2400)
        id, other = await world.create("abcdef"), await world.create("ab", key="l")
        batch = await world.until(id, lambda batch: world.runner.paused(batch) == KEY_STORAGE_FULL)
        assert (await world.ended(other, key="l")).n_completed == 2
        assert batch.n_left
        await world.store.run(world.store.files.delete, world.owner(), big.id)
        world.runner.wake()
        assert (await world.ended(id)).n_completed == 6
