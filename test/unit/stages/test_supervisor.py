"""Stage processes from start to end, with a small fake in place of an engine."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from sglang_live.errors import StageUnavailableError
from sglang_live.messages import Pcm, Ready, StreamEvent, VocoderRequest
from sglang_live.stages import supervisor as supervisor_module
from sglang_live.stages.ports import free_port
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import Supervisor, loopback_address
from sglang_live.stages.transport.protocol import protocol_hash
from sglang_live.stages.transport.server import StageServer
from sglang_live.stages.transport.wire import SHM_DIR, SHM_PREFIX
from sglang_live.telemetry.log_writing import LogDrops
from test.unit.client.cutter import Cutter

pytestmark = pytest.mark.usefixtures("must_not_hang")

FAKE = (sys.executable, str(Path(__file__).with_name("fake_stage.py")))


class SkippingClock:
    """Waits no time, and keeps how long it was asked to."""

    def __init__(self):
        self.slept_s: list[float] = []

    def now_s(self) -> float:
        return sum(self.slept_s)

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await asyncio.sleep(0)


class Stages:
    """A supervisor over fake stages, and what it announced."""

    def __init__(self, run_dir: Path, log_dir: Path | None):
        self.run_dir, self.log_dir = run_dir, log_dir
        self.drops = LogDrops()
        self.clock = SkippingClock()
        self.announced: list[str] = []
        self.deaths: list[tuple[str, list[str]]] = []
        self._supervisor: Supervisor | None = None

    def of(self, *, command: tuple[str, ...] = FAKE, **plans: list[str] | dict) -> Supervisor:
        """plans: by stage, the words of its lives, or its whole engine_args."""
        specs = [
            StageSpec(
                stage=stage,
                replica=0,
                model_path="",
                family="",
                cache_dir="",
                address=loopback_address(self.run_dir, stage, 0),
                same_host=True,
                run_dir=str(self.run_dir),
                served_name="fake",
                engine_args=plan if isinstance(plan, dict) else {"plan": plan},
            )
            for stage, plan in plans.items()
        ]
        self._supervisor = Supervisor(
            specs,
            log_dir=self.log_dir,
            on_change=self._announce,
            command=command,
            clock=self.clock,
            drops=self.drops,
            on_death=lambda name, jobs: self.deaths.append((name, jobs)),
        )
        return self._supervisor

    def _announce(self, replica, what: str) -> None:
        self.announced.append(f"{replica.spec.stage} {what}")

    async def until_announced(self, *announced: str) -> None:
        while self.announced != list(announced):
            await asyncio.sleep(0.002)

    def pids(self, stage: str) -> list[int]:
        """Of all lives of a stage so far."""
        return [int(pid) for pid in (self.run_dir / f"{stage}-lives").read_text().split()]

    async def until_written(self, name: str) -> int:
        path = self.run_dir / name
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.005)
        return int(path.read_text())

    async def stop(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.stop()


@pytest.fixture
async def stages(run_dir, tmp_path):
    (tmp_path / "logs").mkdir()
    running = Stages(run_dir, tmp_path / "logs")
    yield running
    await running.stop()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until_gone(pid: int) -> None:
    while not is_gone(pid):
        await asyncio.sleep(0.005)


def shared_files(pid: int) -> list[Path]:
    return list(SHM_DIR.glob(f"{SHM_PREFIX}*-{pid}-*"))


async def open_job(replica):
    """A job that the stage has begun; leaves a file in shared memory."""
    job = replica.client.open("j")
    await job.begin(VocoderRequest("j", 60.0))
    await anext(job.events())
    return job


async def test_a_killed_stage_fails_its_jobs_at_once_and_comes_back(stages, monkeypatch):
    monkeypatch.setattr(supervisor_module, "PING_EVERY_S", 60.0)  # no ping is needed
    supervisor = stages.of(vocoder=["serve"])
    await supervisor.start()
    [replica] = supervisor.replicas
    assert (replica.is_up, replica.state) == (True, "up")
    first_client, first_pid = replica.client, replica.ready.pid
    replica.sessions.add("peer")

    job = await open_job(replica)
    assert len(shared_files(first_pid)) == 1
    os.kill(first_pid, signal.SIGKILL)
    with pytest.raises(StageUnavailableError, match="vocoder/0: process ended"):
        async for _ in job.events():
            pass
    assert not replica.is_up and replica.state != "up"
    await stages.until_announced("vocoder up", "vocoder down (exit -9)", "vocoder up")
    assert replica.is_up
    assert replica.client is not first_client
    assert replica.ready.pid != first_pid
    assert replica.sessions == {"peer"}, "a peer stays with its replica"
    assert shared_files(first_pid) == []


async def test_a_stage_that_does_not_read_is_put_down_and_comes_back(stages, monkeypatch):
    monkeypatch.setattr(supervisor_module, "PING_EVERY_S", 0.01)
    supervisor = stages.of(vocoder=["serve"])
    await supervisor.start()
    [replica] = supervisor.replicas
    job, first_pid = await open_job(replica), replica.ready.pid
    os.kill(first_pid, signal.SIGSTOP)
    with pytest.raises(StageUnavailableError, match="does not read"):
        while True:
            for _ in range(1000):
                job.post(StreamEvent("j", 1000 * "x", 0.0))
            await job.send(StreamEvent("j", "", 0.0))
    await stages.until_announced("vocoder up", "vocoder down (exit -9)", "vocoder up")
    assert replica.ready.pid != first_pid
    assert supervisor.queue_counts.full >= 1


async def test_restarts_back_off_until_one_succeeds(stages):
    supervisor = stages.of(talker=["serve", "exit", "exit", "exit", "serve", "serve"])
    await supervisor.start()
    up, failed = "talker up", "talker down (exit 3)"
    os.kill(supervisor.replicas[0].ready.pid, signal.SIGKILL)
    lives = [up, "talker down (exit -9)", failed, failed, failed, up]
    await stages.until_announced(*lives)
    assert stages.clock.slept_s == [0, 0, 1, 5, 15]
    os.kill(supervisor.replicas[0].ready.pid, signal.SIGKILL)
    await stages.until_announced(*lives, "talker down (exit -9)", up)
    assert stages.clock.slept_s[5:] == [0], "a start that succeeded forgives the failures before"


async def test_a_stage_that_never_starts_is_named_and_its_log_says_why(stages):
    supervisor = stages.of(thinker=["exit"], vocoder=["serve"])
    with pytest.raises(StageUnavailableError, match=r"thinker/0 did not start \(exit 3\)"):
        await supervisor.start()
    assert "this life: exit" in supervisor.log_of("thinker/0")
    await supervisor.stop()
    assert all(is_gone(pid) for pid in stages.pids("thinker"))


async def test_a_command_that_cannot_run_is_a_stage_that_did_not_start(stages):
    supervisor = stages.of(thinker=["serve"], command=("/no/such/program",))
    with pytest.raises(StageUnavailableError, match=r"thinker/0 did not start .*no/such/program"):
        await supervisor.start()


async def test_stop_ends_a_stage_in_the_middle_of_starting_with_its_children(stages):
    supervisor = stages.of(thinker={"plan": ["hang"], "child": True})
    starting = asyncio.create_task(supervisor.start())
    child = await stages.until_written("child")
    starting.cancel()
    await supervisor.stop()
    assert all(is_gone(pid) for pid in stages.pids("thinker"))
    await until_gone(child)


async def test_stop_right_after_start_leaves_no_process(stages):
    supervisor = stages.of(thinker=["serve"], talker=["serve"])
    starting = asyncio.create_task(supervisor.start())
    await asyncio.sleep(0)
    await supervisor.stop()
    starting.cancel()
    assert all(replica.process is None for replica in supervisor.replicas)
    assert not [p for p in psutil.Process().children() if FAKE[1] in " ".join(p.cmdline())]


async def test_stop_leaves_no_process_no_shared_memory_and_no_open_job(stages):
    supervisor = stages.of(talker={"plan": ["serve"], "child": True})
    await supervisor.start()
    [replica] = supervisor.replicas
    job, pid = await open_job(replica), replica.ready.pid
    child = await stages.until_written("child")
    await supervisor.stop()
    with pytest.raises(StageUnavailableError, match="server stops"):
        async for _ in job.events():
            pass
    assert is_gone(pid) and shared_files(pid) == []
    await until_gone(child)
    assert not replica.is_up and replica.client is None
    await supervisor.stop()  # safe to call twice


async def test_children_of_a_killed_stage_do_not_outlive_it(stages):
    supervisor = stages.of(talker={"plan": ["serve", "hang"], "child": True})
    await supervisor.start()
    child = await stages.until_written("child")
    os.kill(supervisor.replicas[0].ready.pid, signal.SIGKILL)
    await until_gone(child)


async def test_a_stage_is_a_process_group_of_our_own_session(stages):
    supervisor = stages.of(talker={"plan": ["serve"]})
    await supervisor.start()
    pid = supervisor.replicas[0].ready.pid
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid


async def test_a_stage_that_hangs_is_killed_and_started_anew(stages, monkeypatch):
    monkeypatch.setattr(supervisor_module, "PING_EVERY_S", 0.01)
    monkeypatch.setattr(supervisor_module, "HUNG_AFTER_S", 0.1)
    supervisor = stages.of(vocoder=["serve"])
    await supervisor.start()
    os.kill(supervisor.replicas[0].ready.pid, signal.SIGSTOP)
    await stages.until_announced("vocoder up", "vocoder down (exit -9)")
    monkeypatch.setattr(supervisor_module, "HUNG_AFTER_S", 60.0)
    await stages.until_announced("vocoder up", "vocoder down (exit -9)", "vocoder up")


# --- what a stage may have died of ---


@pytest.mark.parametrize(
    ("number", "out_of_memory", "suspected"),
    [
        (signal.SIGSEGV, False, True),
        (signal.SIGABRT, False, True),
        (signal.SIGKILL, True, True),
        (signal.SIGKILL, False, False),
        (signal.SIGTERM, False, False),
    ],
)
async def test_jobs_are_suspect_unless_their_stage_was_ended_from_outside(
    stages, monkeypatch, number, out_of_memory, suspected
):
    kills = itertools.count()
    monkeypatch.setattr(supervisor_module, "oom_kills", lambda: out_of_memory and next(kills))
    supervisor = stages.of(vocoder=["serve"])
    await supervisor.start()
    [replica] = supervisor.replicas
    await open_job(replica)
    replica.client.open("not yet in the stage")
    os.kill(replica.ready.pid, number)
    await stages.until_announced("vocoder up", f"vocoder down (exit {-number})", "vocoder up")
    assert stages.deaths == ([("vocoder/0", ["j"])] if suspected else [])


async def test_jobs_of_a_stage_that_hangs_without_reason_are_not_suspect(stages, monkeypatch):
    monkeypatch.setattr(supervisor_module, "PING_EVERY_S", 0.01)
    monkeypatch.setattr(supervisor_module, "HUNG_AFTER_S", 0.1)
    supervisor = stages.of(vocoder=["serve", "hang"])
    await supervisor.start()
    [replica] = supervisor.replicas
    await open_job(replica)
    os.kill(replica.ready.pid, signal.SIGSTOP)
    await stages.until_announced("vocoder up", "vocoder down (exit -9)")
    assert stages.deaths == []


# --- logs that cannot be written ---


async def test_a_stage_lives_dies_and_returns_on_a_full_log_disk(stages, caplog):
    (stages.log_dir / "vocoder-0.log").symlink_to("/dev/full")
    supervisor = stages.of(vocoder=["serve"])
    await supervisor.start()
    os.kill(supervisor.replicas[0].ready.pid, signal.SIGKILL)
    await stages.until_announced("vocoder up", "vocoder down (exit -9)", "vocoder up")
    await supervisor.stop()
    assert stages.drops.of("vocoder/0") == 2, "each life says one line"
    said = [r for r in caplog.records if r.getMessage().startswith("log_dropped")]
    assert [r.getMessage() for r in said] == [
        "log_dropped log=vocoder/0 error=No space left on device"
    ]


async def test_a_stage_returns_when_the_folder_of_its_log_is_gone(stages):
    supervisor = stages.of(vocoder=["serve"])
    await supervisor.start()
    shutil.rmtree(stages.log_dir)
    os.kill(supervisor.replicas[0].ready.pid, signal.SIGKILL)
    await stages.until_announced("vocoder up", "vocoder down (exit -9)", "vocoder up")


async def test_a_log_goes_on_where_there_is_room_again_and_says_what_is_missing(stages):
    path = stages.log_dir / "vocoder-0.log"
    path.symlink_to("/dev/full")
    supervisor = stages.of(vocoder=["serve"])
    await supervisor.start()
    path.unlink()
    os.kill(supervisor.replicas[0].ready.pid, signal.SIGKILL)
    await stages.until_announced("vocoder up", "vocoder down (exit -9)", "vocoder up")
    await supervisor.stop()
    assert supervisor.log_of("vocoder/0").splitlines() == [
        "(1 lines were dropped here: No space left on device)",
        "this life: serve",
    ]


async def test_a_failing_callback_does_not_keep_a_stage_from_restarting(stages):
    told = []

    def fail(replica, what):
        told.append(what)
        raise OSError(28, "No space left on device")

    supervisor = stages.of(vocoder=["serve"])
    supervisor._on_change = fail
    await supervisor.start()
    os.kill(supervisor.replicas[0].ready.pid, signal.SIGKILL)
    while told != ["up", "down (exit -9)", "up"]:
        await asyncio.sleep(0.002)
    assert supervisor.replicas[0].is_up


@pytest.mark.parametrize("log", ["a file", "a full disk", "stderr"])
async def test_a_failed_start_is_explained_wherever_its_log_goes(stages, log):
    if log == "a full disk":
        (stages.log_dir / "thinker-0.log").symlink_to("/dev/full")
    elif log == "stderr":
        stages.log_dir = None
    supervisor = stages.of(thinker=["raise"])
    with pytest.raises(StageUnavailableError) as refused:
        await supervisor.start()
    assert str(refused.value) == (
        "thinker/0 did not start (exit 1): ValueError: Not enough host memory available"
    )


# --- stages on other hosts ---


class RemoteStage:
    """A stage as another host runs it; every `start` is a process of its own."""

    def __init__(self):
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.protocol = protocol_hash()
        self.closed: list[str] = []
        self._lives = itertools.count()
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        async def run(job) -> None:
            await job.send(Pcm(job.job_id, b"begun"))
            await asyncio.Event().wait()

        async def close_session(session_id: str) -> None:
            self.closed.append(session_id)

        ready = Ready(
            "",
            stage="talker",
            pid=1,
            startup_s=float(next(self._lives)),
            protocol=self.protocol,
        )
        while True:
            with contextlib.suppress(zmq.ZMQError):  # a port is free a moment after its socket
                server = StageServer(
                    self.address,
                    same_host=False,
                    run=run,
                    close_session=close_session,
                    ready=lambda: ready,
                )
                break
            await asyncio.sleep(0.002)
        self._serving = asyncio.create_task(server.serve())

    async def stop(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)


@pytest.fixture
async def remote(monkeypatch):
    monkeypatch.setattr(supervisor_module, "PING_EVERY_S", 0.01)
    stage = RemoteStage()
    yield stage
    await stage.stop()


def visitor(stages: Stages, remote: RemoteStage) -> Supervisor:
    supervisor = stages.of(talker=["unused"])
    [replica] = supervisor.replicas
    replica.spec = msgspec.structs.replace(
        replica.spec, address=remote.address, same_host=False, remote=True
    )
    return supervisor


async def test_a_remote_stage_is_waited_for_and_never_started(stages, remote):
    supervisor = visitor(stages, remote)
    starting = asyncio.create_task(supervisor.start())
    await asyncio.sleep(0)
    await remote.start()
    await starting
    [replica] = supervisor.replicas
    assert replica.is_up and replica.process is None
    await supervisor.stop()
    assert not replica.is_up and replica.client is None


async def test_jobs_of_a_remote_stage_that_falls_silent_fail_and_it_may_come_back(
    stages, remote, monkeypatch
):
    monkeypatch.setattr(supervisor_module, "REMOTE_LOST_AFTER_S", 0.1)
    await remote.start()
    supervisor = visitor(stages, remote)
    await supervisor.start()
    job = await open_job(supervisor.replicas[0])
    await remote.stop()
    with pytest.raises(StageUnavailableError, match="talker/0: no answer"):
        async for _ in job.events():
            pass
    monkeypatch.setattr(supervisor_module, "REMOTE_LOST_AFTER_S", 60.0)
    await remote.start()
    await stages.until_announced("talker up", "talker down (no answer)", "talker up")


async def test_a_broken_connection_tells_of_a_lost_remote_stage_long_before_its_silence(
    stages, remote, monkeypatch
):
    await remote.start()
    supervisor = visitor(stages, remote)
    await supervisor.start()
    monkeypatch.setattr(supervisor_module, "PING_EVERY_S", 600.0)
    job = await open_job(supervisor.replicas[0])
    await remote.stop()
    with pytest.raises(StageUnavailableError, match="talker/0: no answer"):
        async for _ in job.events():
            pass
    monkeypatch.setattr(supervisor_module, "PING_EVERY_S", 0.01)
    await remote.start()
    await stages.until_announced("talker up", "talker down (no answer)", "talker up")


async def test_jobs_end_with_their_connection_and_the_stage_serves_again_over_the_next(
    stages, remote
):
    """What was on its way is lost: a job that went on would lack it."""
    await remote.start()
    network = Cutter(remote.address.removeprefix("tcp://"))
    async with network.listening() as address:
        supervisor = visitor(stages, remote)
        [replica] = supervisor.replicas
        replica.spec = msgspec.structs.replace(replica.spec, address=f"tcp://{address}")
        await supervisor.start()
        job = await open_job(replica)
        network.cut()
        with pytest.raises(StageUnavailableError, match="talker/0: no answer"):
            async for _ in job.events():
                pass
        await stages.until_announced("talker up", "talker down (no answer)", "talker up")
        job = await open_job(replica)
        job.cancel()
        await supervisor.stop()
    assert not stages.deaths


async def test_a_stage_that_was_cut_off_is_told_which_sessions_to_close_when_it_is_back(
    stages, remote
):
    await remote.start()
    network = Cutter(remote.address.removeprefix("tcp://"))
    async with network.listening() as address:
        supervisor = visitor(stages, remote)
        [replica] = supervisor.replicas
        replica.spec = msgspec.structs.replace(replica.spec, address=f"tcp://{address}")
        await supervisor.start()
        replica.close_session("over while it is up")
        while not remote.closed:
            await asyncio.sleep(0.002)
        network.is_down = True
        network.cut()
        await stages.until_announced("talker up", "talker down (no answer)")
        replica.close_session("over while it is cut off")
        network.is_down = False
        await stages.until_announced("talker up", "talker down (no answer)", "talker up")
        while len(remote.closed) < 2:
            await asyncio.sleep(0.002)
        await supervisor.stop()
    assert remote.closed == ["over while it is up", "over while it is cut off"]
    assert not replica.to_close


async def test_the_sessions_of_a_process_on_this_host_have_ended_with_it(stages):
    supervisor = stages.of(talker=["serve"])
    [replica] = supervisor.replicas
    replica.close_session("one")
    assert not replica.to_close


@pytest.mark.parametrize(("its", "named"), [("0123456789ab", "0123456789ab"), ("", "older")])
async def test_a_stage_with_other_messages_is_refused_at_the_start(stages, remote, its, named):
    remote.protocol = its
    await remote.start()
    told = f"its protocol is {named}, and this server's {protocol_hash()}"
    with pytest.raises(StageUnavailableError, match=rf"talker/0 did not start \({told}\)"):
        await visitor(stages, remote).start()
    assert not stages.deaths


async def test_a_stage_is_followed_and_left_while_the_supervisor_runs(stages, remote):
    await remote.start()
    supervisor = visitor(stages, remote)
    spec = supervisor.replicas.pop().spec
    await supervisor.start()
    replica = supervisor.follow(spec)
    assert not replica.is_up and supervisor.replicas == [replica]
    await stages.until_announced("talker up")
    job = await open_job(replica)
    await supervisor.leave(replica)
    with pytest.raises(StageUnavailableError, match="talker/0"):
        async for _ in job.events():
            pass
    assert supervisor.replicas == [] and not replica.is_up and replica.client is None


async def test_a_followed_stage_with_other_messages_serves_once_it_has_the_same(stages, remote):
    remote.protocol = "0123456789ab"
    await remote.start()
    supervisor = visitor(stages, remote)
    spec = supervisor.replicas.pop().spec
    await supervisor.start()
    replica = supervisor.follow(spec)
    while not stages.announced:
        await asyncio.sleep(0.002)
    assert not replica.is_up
    await remote.stop()
    remote.protocol = protocol_hash()
    await remote.start()
    while not replica.is_up:
        await asyncio.sleep(0.002)


async def test_jobs_of_a_remote_stage_that_was_quickly_replaced_fail_too(stages, remote):
    # The socket reconnects by itself; nothing but the answer to a ping tells of the loss.
    await remote.start()
    supervisor = visitor(stages, remote)
    await supervisor.start()
    job = await open_job(supervisor.replicas[0])
    await remote.stop()
    await remote.start()
    with pytest.raises(StageUnavailableError):
        async for _ in job.events():
            pass
    await stages.until_announced("talker up", "talker down (no answer)", "talker up")
