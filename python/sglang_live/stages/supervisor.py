"""Starts every stage replica, watches it, and starts it again when it ends."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sglang_live.aio import close_all
from sglang_live.clock import Clock, MonotonicClock
from sglang_live.errors import StageUnavailableError
from sglang_live.messages import CloseSession, Ready
from sglang_live.stages.endings import cause_of, die_with_parent, oom_kills, was_work
from sglang_live.stages.spec import SPEC_ENV, StageSpec
from sglang_live.stages.stage_logs import StageLogs
from sglang_live.stages.transport.client import StageClient
from sglang_live.stages.transport.peers import new_run
from sglang_live.stages.transport.protocol import protocol_hash
from sglang_live.stages.transport.queues import QueueCounts
from sglang_live.stages.transport.wire import sweep_shared_memory
from sglang_live.stages.zygote import Forked, Zygote
from sglang_live.telemetry.log_writing import LogDrops

log = logging.getLogger(__name__)

PING_EVERY_S = 2.0
# A stage whose event loop does not answer this long is hung, and is killed.
HUNG_AFTER_S = 60.0
# A stage on another host that is silent this long counts as down; it may come back.
REMOTE_LOST_AFTER_S = 6.0
# Seconds before a start, by the number of starts in a row that have failed.
RESTART_DELAY_S = (0.0, 1.0, 5.0, 15.0, 30.0)
# Variables of the environment that no module reads when it is imported.
_OWN_VARIABLES = "SGLANG_LIVE_"
# When a process has ended, its last lines may still be in the pipe.
_LAST_LINES_S = 1.0
STAGE_COMMAND = (sys.executable, "-m", "sglang_live.stages.runtime")


@dataclass(slots=True)
class Replica:
    """One stage process, and those that replace it.

    client: None while it is down.
    ready: its latest answer to a ping. None while it is down.
    process: None while none runs, and for a stage on another host.
    drains: whether it will be gone soon: it gets no new session, and its sessions leave it with
        their next turns.
    sessions: ids of the sessions that stay with it.
    to_close: ids of sessions that it may still hold, and is told to close when it is back.
    n_left: sessions that were placed elsewhere because it was down, or drains.
    status: exit status of its last process; negative: the signal. None: none has ended.
    oom_kills: of the whole machine at its last answer (endings.oom_kills). None: not known.
    """

    spec: StageSpec
    client: StageClient | None = None
    ready: Ready | None = None
    process: asyncio.subprocess.Process | Forked | None = None
    drains: bool = False
    sessions: set[str] = field(default_factory=set)
    to_close: set[str] = field(default_factory=set)
    n_starts: int = 0
    n_left: int = 0
    status: int | None = None
    oom_kills: int | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_up(self) -> bool:
        client = self.client
        return self.ready is not None and client is not None and not client.is_down

    def close_session(self, session_id: str) -> None:
        """Close a session whose connection has broken. A process on this host has ended with it;
        one on another host may only have been cut off."""
        if not self.spec.remote:
            return
        self.to_close.add(session_id)
        if self.is_up:
            self.tell_closed()

    def tell_closed(self) -> None:
        assert self.client is not None
        for session_id in self.to_close:
            self.client.send_later(CloseSession(session_id))
        self.to_close.clear()

    @property
    def state(self) -> str:
        return "up" if self.is_up else "starting" if self.n_starts <= 1 else "restarting"


class Supervisor:
    """
    Args:
        specs: one per replica.
        log_dir: folder of the stages' logs. None: they go to this process's stderr.
        on_change: called when a replica comes up or goes down. It may raise.
        command: of a stage process, which finds its spec in the environment.
        clock: for the waits between starts.
        zygote: forks the stages, except those with variables of their own that other modules may
            read when they are imported. None: each starts by command.
        drops: counts lines for which no log had room.
        on_death: called with the jobs that a replica had when it died, before they fail, if one of
            them may be the cause. Not called when the replica was ended from outside.

    Attributes:
        queue_counts: of all replicas, since the start.
    """

    def __init__(
        self,
        specs: list[StageSpec],
        *,
        log_dir: Path | None = None,
        on_change: Callable[[Replica, str], None] = lambda replica, what: None,
        command: Sequence[str] = STAGE_COMMAND,
        clock: Clock | None = None,
        zygote: Zygote | None = None,
        drops: LogDrops | None = None,
        on_death: Callable[[str, list[str]], None] = lambda name, jobs: None,
    ):
        self._zygote = zygote
        self._run = new_run()
        self.queue_counts = QueueCounts()
        self.replicas = [Replica(spec) for spec in specs]
        self._log_dir = log_dir
        self._on_change = on_change
        self._drops = drops
        self._on_death = on_death
        self._logs: StageLogs | None = None
        self._command = command
        self._clock = clock or MonotonicClock()
        self._watchers: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Start all replicas and wait until each has been ready once.

        Raises:
            StageUnavailableError: a stage ended before it was ready (its log says why).
        """
        as_json = any(replica.spec.log_format == "json" for replica in self.replicas)
        self._logs = StageLogs(self._log_dir, self._drops, as_json=as_json)
        first_up = [asyncio.get_running_loop().create_future() for _ in self.replicas]
        for replica, up in zip(self.replicas, first_up, strict=True):
            self._begin_to_watch(replica, up)
        await asyncio.gather(*first_up)

    def follow(self, spec: StageSpec) -> Replica:
        """Serve with one more stage on another host, from its first answer on. After start().

        spec: with another name than those of the present replicas.
        """
        replica = Replica(spec)
        self.replicas.append(replica)
        first_up = asyncio.get_running_loop().create_future()
        first_up.set_result(None)  # nothing waits for it
        self._begin_to_watch(replica, first_up)
        return replica

    async def leave(self, replica: Replica) -> None:
        """Serve without a stage on another host, whose jobs fail now."""
        self.replicas.remove(replica)
        watcher = self._watchers.pop(replica.name)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)

    async def stop(self) -> None:
        watchers = self._watchers.values()
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        ends = [partial(self._put_down, replica, "server stops") for replica in self.replicas]
        logs = [] if self._logs is None else [partial(asyncio.to_thread, self._logs.close)]
        await close_all(*ends, *logs)

    def log_of(self, name: str) -> str:
        """What a replica has logged so far. Only with a log_dir."""
        path = self._logs.path_of(name) if self._logs is not None else None
        assert path is not None
        return path.read_text("utf-8", errors="replace")

    async def _cause(self, replica: Replica) -> str:
        """Why it did not start, from its last lines: a text behind a colon, or ""."""
        if replica.spec.remote or self._logs is None:
            return ""
        # If it had no process, the zygote has failed.
        name = replica.spec.name if replica.status is not None else "zygote"
        lines = await asyncio.to_thread(self._logs.last_lines, name, _LAST_LINES_S)
        cause = cause_of(replica.status, lines, self._out_of_memory(replica))
        return f": {cause}" if cause else ""

    def _out_of_memory(self, replica: Replica) -> bool:
        """Whether the kernel may have killed for lack of memory since the last answer."""
        now = oom_kills()
        return now is None or replica.oom_kills is None or now > replica.oom_kills

    def _begin_to_watch(self, replica: Replica, first_up: asyncio.Future[None]) -> None:
        watching = self._watch(replica, first_up)
        self._watchers[replica.name] = asyncio.create_task(watching, name=f"watch {replica.name}")

    def _announce(self, replica: Replica, what: str) -> None:
        try:
            self._on_change(replica, what)
        except Exception:
            # An error of the callback must not end the stage.
            log.exception("announcing_failed %s %s", replica.spec.name, what)

    async def _watch(self, replica: Replica, first_up: asyncio.Future[None]) -> None:
        failures = 0
        while True:
            delay_s = RESTART_DELAY_S[min(failures, len(RESTART_DELAY_S) - 1)]
            await self._clock.sleep(delay_s)
            run_once = self._visit_once if replica.spec.remote else self._run_once
            try:
                came_up, end = await run_once(replica, first_up)
            except Exception as error:
                # After any error the stage has to start again.
                log.exception("watching_failed %s", replica.spec.name)
                came_up, end = False, repr(error)
                try:
                    await self._put_down(replica, "watching it failed")
                except Exception:
                    log.exception("putting_down_failed %s", replica.spec.name)
            self._announce(replica, f"down ({end})")
            if not first_up.done():
                cause = await self._cause(replica)
                text = f"{replica.spec.name} did not start ({end}){cause}"
                first_up.set_exception(StageUnavailableError(text))
                return
            failures = 0 if came_up else failures + 1

    async def _run_once(self, replica: Replica, first_up: asyncio.Future[None]) -> tuple[bool, str]:
        """Run one process from start to end. Returns whether it was ready, and how it ended."""
        try:
            await self._spawn(replica)
        except OSError as error:
            return False, str(error)
        assert replica.process is not None and replica.client is not None
        ended = asyncio.create_task(replica.process.wait())
        came_up = await self._until_ready(replica, ended)
        if came_up:
            self._came_up(replica, first_up)
            await self._while_alive(replica, ended, HUNG_AFTER_S)
            if ended.done() and was_work(ended.result(), self._out_of_memory(replica)):
                self._on_death(replica.spec.name, replica.client.unfinished())
        code = await self._put_down(replica, "process ended")
        return came_up, f"exit {code}"

    async def _visit_once(
        self, replica: Replica, first_up: asyncio.Future[None]
    ) -> tuple[bool, str]:
        """Follow a stage on another host, from its first answer until it is silent."""
        spec = replica.spec
        client = replica.client = self._client(spec)
        replica.n_starts += 1
        never = asyncio.get_running_loop().create_future()
        log.info("stage_awaited %s address=%s", spec.name, spec.address)
        try:
            await self._until_ready(replica, never)
            assert replica.ready is not None
            if (its := replica.ready.protocol) != protocol_hash():
                return (
                    False,
                    f"its protocol is {its or 'older'}, and this server's {protocol_hash()}",
                )
            replica.tell_closed()  # before a session can be there again
            self._came_up(replica, first_up)
            await self._while_alive(replica, never, REMOTE_LOST_AFTER_S)
        finally:
            never.cancel()
            replica.ready = replica.client = None
            client.fail_all("no answer")
            await client.close()
        return True, "no answer"

    def _came_up(self, replica: Replica, first_up: asyncio.Future[None]) -> None:
        if not first_up.done():
            first_up.set_result(None)
        self._announce(replica, "up")

    async def _spawn(self, replica: Replica) -> None:
        spec = replica.spec
        replica.status = None
        replica.oom_kills = oom_kills()
        _remove_stale_socket(spec.address)
        environment = {**os.environ, **spec.environment, SPEC_ENV: spec.to_env()}
        assert self._logs is not None
        out = self._logs.open(spec.name)
        try:
            replica.process = await self._begin(spec, environment, out)
        finally:
            os.close(out)
        replica.n_starts += 1
        replica.client = self._client(spec)
        log.info("stage_spawned %s pid=%d", spec.name, replica.process.pid)

    def _client(self, spec: StageSpec) -> StageClient:
        return StageClient(
            spec.name,
            spec.address,
            same_host=spec.same_host,
            key_file=spec.key_file,
            run=self._run,
            shm_run=spec.run,
            counts=self.queue_counts,
        )

    async def _begin(
        self, spec: StageSpec, environment: dict[str, str], out: int
    ) -> asyncio.subprocess.Process | Forked:
        """Start the process in a process group of its own, so that SGLang's children end with it.

        Not in a session of its own: Linux may give each session an equal share of the cores
        (sched(7), "The autogroup feature"). Stages then delay the gateway and one another by up to
        half a second, whatever their nice values.
        """
        logs = self._logs
        read_late = all(name.startswith(_OWN_VARIABLES) for name in spec.environment)
        if self._zygote is not None and read_late and logs is not None:
            return await self._zygote.fork(environment, out, lambda: logs.open("zygote"))
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # Not process_group=0: uvloop, on which the server runs, refuses it.
                preexec_fn=_begin_child,
            )
        except OSError as error:
            error.filename = self._command[0]  # uvloop does not set it
            raise

    async def _until_ready(self, replica: Replica, ended: asyncio.Future[Any]) -> bool:
        client = replica.client
        assert client is not None
        while not ended.done():
            ready = await _answer(client, {ended}, 0.25)
            if ready is not None:
                replica.ready = ready
                return True
        return False

    async def _while_alive(
        self, replica: Replica, ended: asyncio.Future, lost_after_s: float
    ) -> None:
        client = replica.client
        assert client is not None
        client.broken.clear()  # of connections before the first answer
        broken = asyncio.create_task(client.broken.wait())
        try:
            await self._while_connected(replica, {ended, broken}, lost_after_s)
        finally:
            broken.cancel()
        if broken.done() and not ended.done():
            # The process may be there, but what was on its way is lost: no job can go on.
            log.error("stage_lost %s", replica.spec.name)

    async def _while_connected(
        self, replica: Replica, ends: set[asyncio.Future[Any]], lost_after_s: float
    ) -> None:
        client, silent_s = replica.client, 0.0
        assert client is not None
        while not any(end.done() for end in ends):
            await asyncio.wait(ends, timeout=PING_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            ready = await _answer(client, ends, PING_EVERY_S)
            if client.is_down:  # it has logged why
                return
            if ready is not None:
                replica.ready, silent_s, replica.oom_kills = ready, 0.0, oom_kills()
                continue
            silent_s += 2 * PING_EVERY_S
            if silent_s > lost_after_s:
                log.error("stage_silent %s silent_s=%.0f", replica.spec.name, silent_s)
                return

    async def _put_down(self, replica: Replica, reason: str) -> int | None:
        """Fail the replica's jobs at once, then end its process group. Returns the exit code."""
        replica.ready = None
        process, client = replica.process, replica.client
        if process is None:
            return None
        assert client is not None
        client.fail_all(reason)
        _kill_group(process.pid)
        replica.status = await process.wait()
        await client.close()
        try:
            sweep_shared_memory(replica.spec.run, process.pid)
        except OSError as error:
            log.error("not_swept %s error=%s", replica.spec.name, error)
        # Only now, because stop() may cancel the watcher anywhere above.
        replica.process = replica.client = None
        return replica.status


async def _answer(
    client: StageClient, ends: set[asyncio.Future[Any]], timeout_s: float
) -> Ready | None:
    """The answer to a ping. None: it did not come in time, or one of the ends came first."""
    ping = asyncio.create_task(client.ping(timeout_s))
    try:
        await asyncio.wait({ping, *ends}, return_when=asyncio.FIRST_COMPLETED)
        return ping.result() if ping.done() else None
    finally:
        ping.cancel()


def loopback_address(run_dir: Path, stage: str, replica: int) -> str:
    return f"ipc://{run_dir / f'{stage}-{replica}'}"


def _kill_group(leader_pid: int) -> None:
    """SIGKILL every process of a stage's group, also when its leader has ended."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(leader_pid, signal.SIGKILL)


def _remove_stale_socket(address: str) -> None:
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def _begin_child() -> None:
    """Before the program of a child begins: its imports take seconds, in which this one may end."""
    os.setpgrp()
    die_with_parent()


_PREFIX = "sglang_live_stage_"


class StageCollector:
    """For a prometheus_client registry. replicas: called at each scrape."""

    def __init__(self, replicas: Callable[[], Iterable[Replica]]):
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        labels = ["stage", "replica"]
        up = GaugeMetricFamily(_PREFIX + "up", "1 while the replica serves.", labels=labels)
        starts = GaugeMetricFamily(_PREFIX + "starts", "Times it was started.", labels=labels)
        left = CounterMetricFamily(
            _PREFIX + "sessions_left",
            "Sessions that were placed elsewhere because the replica was down, or drains.",
            labels=labels,
        )
        load = GaugeMetricFamily(
            _PREFIX + "load", "What the replica says of itself.", labels=[*labels, "what"]
        )
        for replica in self._replicas():
            names = [replica.spec.stage, str(replica.spec.replica)]
            up.add_metric(names, float(replica.is_up))
            starts.add_metric(names, float(replica.n_starts))
            left.add_metric(names, float(replica.n_left))
            for what, value in (replica.ready.load if replica.ready else {}).items():
                load.add_metric([*names, what], value)
        yield from (up, starts, left, load)
