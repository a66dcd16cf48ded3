"""Whatever engines do or die of, the memory of both adds up to what they began with."""

import asyncio
import os
import random

import pytest
import pytest_asyncio

from sglang_live.extensions.elastic import mover
from sglang_live.extensions.elastic.messages import Give, Given, Packet
from sglang_live.extensions.elastic.mover import KvMover
from sglang_live.extensions.elastic.policy import ElasticConfig
from test.unit.extensions.elastic.fake_kv_engine import UNIT, FakeKvEngine

pytestmark = pytest.mark.asyncio
START = 20 * UNIT


class Pair:
    def __init__(self, path):
        self.path = path
        # The window is short: an engine's earlier need does not matter here.
        self.mover = KvMover(ElasticConfig(elastic_window_s=0.001))
        self.engines: dict[str, FakeKvEngine] = {}

    async def begin(self, stage: str, behaviour: str = "") -> FakeKvEngine:
        engine = FakeKvEngine(self.path, stage, START, behaviour)
        self.engines[stage] = engine
        await self.until(lambda: f"{stage}_granules" in self.mover.report())
        return engine

    async def ask(self, stage: str, **need: int) -> dict:
        return await asyncio.to_thread(self.engines[stage].ask, **need)

    async def both(self, thinker: str = "", talker: str = "") -> None:
        await self.begin("thinker", thinker)
        await self.begin("talker", talker)
        for stage in self.engines:
            await self.ask(stage, needed=UNIT)

    async def kill(self, stage: str) -> None:
        await asyncio.to_thread(self.engines[stage].kill)
        await self.until(lambda: f"{stage}_granules" not in self.mover.report())

    async def until(self, condition) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def sizes(self) -> list[int]:
        return [(await self.ask(stage))["size"] for stage in sorted(self.engines)]

    def count(self, name: str) -> int:
        return self.mover.counts[name]


@pytest_asyncio.fixture
async def pair(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    made = Pair(tmp_path / "mover")
    made.mover.start(tmp_path / "mover")
    yield made
    for engine in made.engines.values():
        engine.kill()
    await made.mover.stop()
    # No file stays open: neither of the memory that has moved, nor of dead engines.
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_memory_moves_to_the_engine_that_needs_it(pair):
    await pair.both()
    await pair.ask("thinker", needed=30 * UNIT)
    await pair.until(lambda: pair.count("moves_urgent") == 1)
    assert await pair.sizes() == [10 * UNIT, 30 * UNIT]
    states = [await pair.ask(stage) for stage in pair.engines]
    assert all(state["dirty"] == 0 for state in states)  # no bytes of the giver arrive
    assert pair.mover.report()["granules_moved"] == 10 * UNIT


async def test_memory_returns_when_it_is_not_needed(pair):
    await pair.both()
    await pair.ask("thinker", needed=35 * UNIT)
    await pair.until(lambda: pair.count("moves_urgent") == 1)
    await pair.ask("thinker", needed=UNIT)
    await pair.until(lambda: pair.count("moves_unhurried") >= 1)
    sizes = await pair.sizes()
    assert sum(sizes) == 2 * START and sizes[0] == START
    assert (await pair.ask("thinker"))["files"] == 1  # it has returned the file with the memory


async def test_memory_with_a_file_for_each_granule_moves_in_several_messages(pair):
    await pair.both(talker="passes_little")
    await pair.ask("thinker", needed=30 * UNIT)
    await pair.until(lambda: pair.count("moves_urgent") == 1)
    assert await pair.sizes() == [10 * UNIT, 30 * UNIT]
    assert (await pair.ask("talker"))["orders"] == 20
    assert pair.mover.report()["granules_moved"] == 10 * UNIT


async def test_engines_on_different_devices_are_no_pair(pair, caplog):
    await pair.begin("thinker")
    engine = FakeKvEngine(pair.path, "talker", START, "elsewhere")
    await pair.until(lambda: pair.count("refused_elsewhere") == 1)
    assert "place=elsewhere other=cpu" in caplog.text
    assert set(pair.mover._engines) == {"thinker"}
    engine.kill()


async def test_engines_know_what_they_could_receive(pair):
    await pair.both()
    async with asyncio.timeout(20):
        while (await pair.ask("thinker"))["obtainable"] != 19 * UNIT:
            await asyncio.sleep(0.02)
    await pair.kill("talker")
    async with asyncio.timeout(20):
        while (state := await pair.ask("thinker"))["obtainable"] != 0:
            await asyncio.sleep(0.02)
    assert state["peer_died"] == 1


async def test_an_engine_that_cannot_free_its_memory_is_left_alone_for_a_while(pair):
    await pair.both(talker="refuses_give")
    await pair.ask("thinker", needed=30 * UNIT)
    await pair.until(lambda: pair.count("refused_in_use") == 1)
    for n in range(20):
        await pair.ask("thinker", needed=30 * UNIT + n)
    assert pair.count("refused_in_use") <= 2
    assert await pair.sizes() == [START, START]


@pytest.mark.parametrize("behaviour", ["dies_on_take", "cannot_map"])
async def test_memory_that_its_receiver_does_not_map_returns(pair, behaviour):
    await pair.both(thinker=behaviour)
    await pair.ask("thinker", needed=30 * UNIT)
    await pair.until(lambda: pair.count("returned") == 1)
    await pair.until(lambda: pair.mover.report()["talker_granules"] == START)
    assert (await pair.ask("talker"))["size"] == START
    assert pair.count("granules_lost") == 0
    if behaviour == "dies_on_take":
        await pair.begin("thinker")
        assert await pair.sizes() == [START, START]


async def test_after_the_death_of_a_giver_the_next_one_begins_with_the_rest(pair):
    await pair.both()
    await pair.ask("thinker", needed=30 * UNIT)
    await pair.until(lambda: pair.count("moves_urgent") == 1)
    await pair.kill("talker")
    assert (await pair.ask("thinker"))["size"] == 30 * UNIT  # it keeps what it has
    await pair.begin("talker")
    assert await pair.sizes() == [10 * UNIT, 30 * UNIT]
    # Memory of the dead process moves on like any other.
    await pair.ask("thinker", needed=UNIT)
    await pair.ask("talker", needed=25 * UNIT)
    await pair.until(lambda: pair.mover.report()["talker_granules"] >= 25 * UNIT)
    assert sum(await pair.sizes()) == 2 * START


async def test_nothing_is_promised_of_an_engine_that_does_not_answer(pair, monkeypatch):
    monkeypatch.setattr(mover, "_LATE_S", 0.2)
    await pair.both(talker="hangs_on_give")
    await pair.ask("thinker", needed=30 * UNIT)
    await pair.until(lambda: pair.count("orders_late") == 1)
    async with asyncio.timeout(20):
        while (await pair.ask("thinker"))["obtainable"] != 0:
            await asyncio.sleep(0.02)
    await pair.until(lambda: pair.count("moves_urgent") == 1)  # it goes on
    assert await pair.sizes() == [10 * UNIT, 30 * UNIT]
    async with asyncio.timeout(20):
        while (await pair.ask("thinker"))["obtainable"] == 0:
            await asyncio.sleep(0.02)


async def test_files_of_an_answer_that_comes_while_the_mover_stops_are_closed(pair):
    await pair.both(talker="hangs_on_give")
    talker, file = pair.mover._engines["talker"], os.memfd_create("late")
    ordering = asyncio.create_task(pair.mover._order(talker, Give(UNIT, urgent=True)))
    while talker.answer is None:
        await asyncio.sleep(0)
    talker.answer.set_result(Packet(Given([], START), [file]))
    ordering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ordering
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


async def test_an_engine_that_dies_of_an_order_ends_the_move(pair):
    await pair.both(talker="dies_on_give")
    await pair.ask("thinker", needed=30 * UNIT)
    await pair.until(lambda: pair.count("engines_ended") == 1)
    await pair.begin("talker")
    await pair.ask("talker", needed=UNIT)
    await pair.until(lambda: pair.count("moves_urgent") == 1)
    assert sum(await pair.sizes()) == 2 * START


async def test_other_processes_get_no_memory(pair):
    await pair.both()
    for stage in ("thinker", "vocoder"):
        other = FakeKvEngine(pair.path, stage, START)
        await pair.until(lambda: pair.count("refused_connection") == 1)
        pair.mover.counts.clear()
        await asyncio.to_thread(other.kill)
    assert await pair.sizes() == [START, START]


async def test_sizes_add_up_through_any_needs_and_deaths(pair):
    rng = random.Random(8)
    await pair.both()
    for _ in range(60):
        busy, other = rng.sample(("thinker", "talker"), 2)
        await pair.ask(other, needed=rng.randrange(1, 4) * UNIT)
        await pair.ask(busy, needed=rng.randrange(20, 45) * UNIT)
        await asyncio.sleep(rng.choice((0.0, 0.002, 0.02)))
        stage = rng.choice((busy, other))
        if rng.random() < 0.15:
            await pair.kill(stage)
            await pair.begin(stage)
            await pair.ask(stage, needed=UNIT)
    async with pair.mover._moving:
        assert sum(await pair.sizes()) == 2 * START
    for stage in pair.engines:
        await pair.ask(stage, needed=UNIT)
    await pair.ask("talker", needed=START + 5 * UNIT)
    await pair.until(lambda: pair.mover.report()["talker_granules"] >= START + 5 * UNIT)
    assert pair.count("granules_lost") == 0
