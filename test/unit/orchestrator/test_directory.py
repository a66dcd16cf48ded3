"""Gateways follow a cluster's table: replicas appear, drain and vanish while sessions go on."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sglang_live.capacity.control import CapacityConfig, CapacityControl
from sglang_live.clock import MonotonicClock
from sglang_live.errors import StageUnavailableError
from sglang_live.messages import Ready
from sglang_live.orchestrator import directory as directory_module
from sglang_live.orchestrator.directory import (
    FileDirectory,
    FollowedStages,
    Table,
    TableRow,
)
from sglang_live.orchestrator.sessions import Orchestrator
from sglang_live.stages.ports import free_port
from sglang_live.stages.supervisor import Supervisor
from sglang_live.stages.transport.protocol import protocol_hash
from sglang_live.stages.transport.server import StageServer

from .fakes import FakeStage, FakeTalker, FakeThinker, FakeVocoder, ask, user
from .test_moves import lost_jobs, told
from .test_sessions import done
from .test_turns import answer, sound, transcript

pytestmark = pytest.mark.usefixtures("must_not_hang")

STAGES = ("thinker", "talker", "vocoder")
REPLY = [5, 6, 7, 8, 9]


class FarStage:
    """A fake stage on another host, as a StageHost runs it."""

    def __init__(self, fake: FakeStage, number: int):
        self.fake = fake
        self.row = TableRow(
            replica=f"{fake.name}/{number}",
            address=f"tcp://127.0.0.1:{free_port()}",
            protocol=protocol_hash(),
        )
        self.server = StageServer(
            self.row.address,
            same_host=False,
            run=fake.run,
            close_session=fake.close_session,
            ready=self._ready,
        )
        self._serving = asyncio.create_task(self.server.serve())

    def _ready(self) -> Ready:
        return Ready("", stage=self.fake.name, pid=1, startup_s=0.0, protocol=protocol_hash())

    async def stop(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)


class Cluster:
    """far: stages by replica. rows: of the table, as it is written."""

    def __init__(self, path: Path, run_dir: Path):
        self.path = path
        self.far: dict[str, FarStage] = {}
        self.rows: dict[str, TableRow] = {}
        self.clock = MonotonicClock()
        self.supervisor = Supervisor([])
        self.directory = FileDirectory(
            path, key_file="", keyless=False, run_dir=run_dir, clock=self.clock
        )
        self.followed = FollowedStages(self.directory, self.supervisor, STAGES, self.clock)
        self.orchestrator: Orchestrator

    async def start(self) -> None:
        await self.followed.start()
        self.orchestrator = Orchestrator(
            self.supervisor,
            model_name="fake",
            voices=("ethan",),
            capacity=CapacityControl(CapacityConfig(max_sessions=8, adapts=False), self.clock),
            clock=self.clock,
        )

    def add(self, *fakes: FakeStage, number: int) -> None:
        for fake in fakes:
            far = FarStage(fake, number)
            self.far[far.row.replica] = far
            self.rows[far.row.replica] = far.row

    def change(self, replica: str, **values) -> None:
        self.rows[replica] = msgspec.structs.replace(self.rows[replica], **values)

    def write(self) -> None:
        self.path.write_bytes(msgspec.json.encode(Table(tuple(self.rows.values()))))

    async def until(self, holds) -> None:
        while not holds():
            await asyncio.sleep(0.005)

    def replica(self, name: str):
        return next(one for one in self.supervisor.replicas if one.name == name)

    async def settled(self) -> None:
        self.write()
        bound = {r.replica: r for r in self.rows.values() if r.protocol == protocol_hash()}
        await self.until(lambda: {r.name for r in self.supervisor.replicas} == bound.keys())
        for name, row in bound.items():
            drains = row.state == "draining"
            await self.until(
                lambda name=name, drains=drains: (
                    self.replica(name).is_up and self.replica(name).drains == drains
                )
            )

    def metrics(self) -> str:
        registry = CollectorRegistry()
        registry.register(self.followed)
        return generate_latest(registry).decode()

    async def stop(self) -> None:
        await self.followed.stop()
        await self.supervisor.stop()
        for far in self.far.values():
            await far.stop()


@pytest.fixture
async def cluster(tmp_path, run_dir, monkeypatch):
    monkeypatch.setattr(directory_module, "_READ_EVERY_S", 0.01)
    made = Cluster(tmp_path / "stages.json", run_dir)
    for number in (0, 1):
        made.add(FakeThinker(REPLY), FakeTalker(), FakeVocoder(), number=number)
    made.write()
    yield made
    await made.stop()


async def test_a_gateway_serves_once_the_table_has_every_stage(cluster):
    held = {n: cluster.rows.pop(n) for n in ("vocoder/0", "vocoder/1")}
    cluster.path.unlink()
    starting = asyncio.create_task(cluster.start())
    await cluster.until(lambda: cluster.directory.n_unreadable)
    cluster.write()
    await cluster.until(lambda: cluster.followed.missing() == ["vocoder"])
    assert not starting.done()
    cluster.rows |= held
    cluster.write()
    await starting
    assert cluster.followed.missing() == []


async def test_a_turn_over_a_followed_table_is_whole(cluster):
    await cluster.start()
    await cluster.settled()
    session = await cluster.orchestrator.open_session("one")
    events = await answer(session, ask("t1", user("u1", "hi", 300)))
    assert (transcript(events), sound(events)) == (" 5 6 7 8 9", REPLY)


@pytest.mark.parametrize("stage", STAGES)
async def test_sessions_leave_a_replica_that_drains_with_their_next_turn(cluster, stage):
    await cluster.start()
    await cluster.settled()
    session = await cluster.orchestrator.open_session("one")
    await done(session, ask("t1", user("u1", "hi")))
    cluster.change(f"{stage}/0", state="draining")
    await cluster.settled()
    left, other = (cluster.far[f"{stage}/{n}"].fake for n in (0, 1))
    new = await cluster.orchestrator.open_session("new")
    assert new.links is not None and "new" in cluster.replica(f"{stage}/1").sessions
    assert left.closed_sessions == [], "it has the session until the next turn"
    end = await done(session, ask("t2", user("u1", "hi"), user("u2", "and")))
    assert end.status == "completed" and len(other.openers) == 1
    await cluster.until(lambda: left.closed_sessions == ["one"])
    assert left.items == {}, "nothing of it is left there"
    assert cluster.replica(f"{stage}/0").n_left == 1
    assert not lost_jobs(cluster)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_turn_ends_where_it_runs_when_its_replica_begins_to_drain(cluster, stage):
    await cluster.start()
    await cluster.settled()
    fake = cluster.far[f"{stage}/0"].fake
    fake.holds_at = 2
    session = await cluster.orchestrator.open_session("one")
    running = asyncio.create_task(answer(session, ask("t1", user("u1", "hi"))))
    await cluster.until(lambda: fake.held)
    cluster.change(f"{stage}/0", state="draining")
    await cluster.settled()
    other = await done(session, ask("t0", user("u0", "aside"), stateless=True))
    assert other.status == "completed"
    fake.release()
    assert sound(await running) == REPLY
    assert not fake.cancelled and not lost_jobs(cluster)


async def test_another_stage_that_is_lost_moves_no_job_out_of_a_draining_replica(cluster):
    await cluster.start()
    await cluster.settled()
    thinker, vocoder = (cluster.far[f"{stage}/0"].fake for stage in ("thinker", "vocoder"))
    thinker.holds_at, vocoder.holds_at = 4, 1
    session = await cluster.orchestrator.open_session("one")
    running = asyncio.create_task(answer(session, ask("t1", user("u1", "hi"))))
    await cluster.until(lambda: thinker.held and vocoder.held)
    cluster.change("thinker/0", state="draining")
    del cluster.rows["vocoder/0"]
    await cluster.settled()
    await cluster.until(lambda: cluster.far["vocoder/1"].fake.openers)
    assert thinker.closed_sessions == []
    thinker.release()
    assert sound(await running) == REPLY
    assert lost_jobs(cluster) == {("vocoder", "moved"): 1}


@pytest.mark.parametrize("stage", STAGES)
async def test_a_turn_goes_on_when_its_replica_vanishes_from_the_table(cluster, stage):
    await cluster.start()
    await cluster.settled()
    fake = cluster.far[f"{stage}/0"].fake
    fake.holds_at = 2
    session = await cluster.orchestrator.open_session("one")
    turn = ask("t1", user("u1", "hi"))
    running = asyncio.create_task(answer(session, turn))
    await cluster.until(lambda: fake.held)
    del cluster.rows[f"{stage}/0"]
    await cluster.settled()
    again = await cluster.orchestrator.open_session("undisturbed")
    assert told(await running) == told(await answer(again, turn))
    assert lost_jobs(cluster) == {(stage, "moved"): 1}


async def test_a_replica_that_appears_gets_sessions(cluster):
    rows = {name: cluster.rows.pop(name) for name in list(cluster.rows) if name.endswith("/1")}
    cluster.write()
    await cluster.start()
    await cluster.settled()
    await cluster.orchestrator.open_session("one")
    cluster.rows |= rows
    await cluster.settled()
    await cluster.orchestrator.open_session("two")
    assert all(len(replica.sessions) == 1 for replica in cluster.supervisor.replicas)


@pytest.mark.parametrize(
    "left", [b"", b"no table", b'{"replicas": [{"replica": "talker/0"}]}', None]
)
async def test_a_table_that_cannot_be_read_stays_as_it_was(cluster, left):
    await cluster.start()
    await cluster.settled()
    names = [replica.name for replica in cluster.supervisor.replicas]
    if left is None:
        cluster.path.unlink()
    else:
        cluster.path.write_bytes(left)
    await cluster.until(lambda: cluster.directory.n_unreadable)
    session = await cluster.orchestrator.open_session("one")
    assert (await done(session, ask("t1", user("u1", "hi")))).status == "completed"
    assert [replica.name for replica in cluster.supervisor.replicas] == names
    assert "sglang_live_directory_unreadable_total 1.0" in cluster.metrics()


@pytest.mark.parametrize(
    "changed",
    [
        {"address": "tcp://192.0.2.7:7101"},  # without a key
        {"replica": "talker/1"},  # there twice
        {"replica": "singer/0"},
        {"address": "127.0.0.1"},
    ],
)
async def test_a_table_with_a_wrong_row_is_not_followed(cluster, changed):
    await cluster.start()
    await cluster.settled()
    good = msgspec.to_builtins(Table(tuple(cluster.rows.values())))
    for row in good["replicas"]:
        if row["replica"] == "talker/0":
            row.update(changed)
    cluster.path.write_bytes(msgspec.json.encode(good))
    await cluster.until(lambda: cluster.directory.n_unreadable)
    assert {r.spec.address for r in cluster.supervisor.replicas} == {
        row.address for row in cluster.rows.values()
    }


async def test_replicas_with_other_messages_are_named_and_get_nothing(cluster, caplog):
    cluster.change("talker/0", protocol="0123456789ab")
    cluster.write()
    await cluster.start()
    await cluster.settled()
    assert "talker/0" not in [replica.name for replica in cluster.supervisor.replicas]
    named = [r.getMessage() for r in caplog.records if "stage_not_bound" in r.getMessage()]
    assert len(named) == 1 and "talker/0" in named[0] and "0123456789ab" in named[0]
    series = cluster.metrics()
    of_talkers = "sglang_live_directory_replica{replica="
    assert f'{of_talkers}"talker/0",state="other_protocol",zone=""}} 1.0' in series
    assert f'{of_talkers}"talker/1",state="serving",zone=""}} 1.0' in series


async def test_with_all_replicas_draining_sessions_stay_and_new_ones_are_refused(cluster):
    await cluster.start()
    await cluster.settled()
    session = await cluster.orchestrator.open_session("one")
    for number in (0, 1):
        cluster.change(f"talker/{number}", state="draining")
    await cluster.settled()
    assert (await done(session, ask("t1", user("u1", "hi")))).status == "completed"
    with pytest.raises(StageUnavailableError, match="no talker is up"):
        await cluster.orchestrator.open_session("new")
    assert "one" in cluster.replica("talker/0").sessions


async def test_without_a_replica_of_a_stage_sessions_are_refused(cluster):
    await cluster.start()
    await cluster.settled()
    for name in ("talker/0", "talker/1"):
        del cluster.rows[name]
    await cluster.settled()
    with pytest.raises(StageUnavailableError, match="no talker is up"):
        await cluster.orchestrator.open_session("new")
    assert cluster.followed.missing() == ["talker"]
