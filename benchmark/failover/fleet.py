"""Two hosts with all stages, two gateways that follow their table, and an entry, on this machine.

They are what launch_cluster has Ray place, started without Ray: losses are found and cured by the
gateways, and processes started again by their hosts.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from benchmark.ending import end_like_ctrl_c
from benchmark.load.server import ServerError, ServerProcess
from sglang_live.cluster.child import MARK
from sglang_live.cluster.hosted import HostNews, StagesOrder
from sglang_live.orchestrator.directory import Table, TableRow
from sglang_live.policy.policies import POLICIES
from sglang_live.stages.spec import STAGES

START_TIMEOUT_S = 300.0
# Admission would refuse sessions of a machine that is slow, and stages here share no device.
NAMES = tuple(name for name in POLICIES if name not in ("admission", "arbiter"))
_POLL_S = 0.05
_END_S = 20.0


def wait_until(holds: Callable[[], bool], limit_s: float, what: Callable[[], str]) -> None:
    """Raises TimeoutError. what: called for its message."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {limit_s:g} s: {what()}")
        time.sleep(_POLL_S)


class Host:
    """A host's processes: a replica of each stage, started again when it ends.

    news: what it has told last.
    """

    def __init__(self, number: int, model_path: str, folder: Path, key_file: Path):
        self.number, self.news = number, HostNews()
        argv = ["--model-path", model_path, "--live-policies", ",".join(NAMES)]
        argv += ["--stage-key-file", str(key_file)]
        self._order = StagesOrder(argv=argv, stages=list(STAGES), address="127.0.0.1", command=[])
        self._log = folder / f"host-{number}.log"

    def __enter__(self) -> Self:
        command, pipe = (
            [sys.executable, "-m", "sglang_live.cluster.hosted", "stages"],
            subprocess.PIPE,
        )
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log)
        assert self._process.stdin is not None
        # It ends when its stdin does, as it does with this process.
        self._process.stdin.write(msgspec.json.encode(self._order) + b"\n")
        self._process.stdin.flush()
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its stages end with it
            self._process.wait()

    def wait_until_up(self) -> None:
        def is_up() -> bool:
            if (code := self._process.poll()) is not None:
                raise ServerError(f"a host exited with {code}\n{self.log_tail()}")
            return self.news.is_up

        wait_until(is_up, START_TIMEOUT_S, self.log_tail)

    def log_tail(self) -> str:
        return self._log.read_text("utf-8", errors="replace")[-3000:]

    def rows(self, state: Any) -> list[TableRow]:
        """Of the table that gateways follow."""
        return [
            TableRow(
                replica=f"{one.stage}/{self.number}",
                address=one.address,
                protocol=self.news.protocol,
                state=state,
            )
            for one in self.news.replicas
        ]

    def process_of(self, stage: str) -> psutil.Process:
        """Raises LookupError: it has none at the moment."""
        for process in self._children():
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(f"sglang_live::{stage}/"):
                    return process
        raise LookupError(stage)

    def stop(self) -> None:
        """It answers nothing, as one that is cut off."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._children():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK.encode()):
                self.news = msgspec.json.decode(line[len(MARK) :], type=HostNews)


class Fleet:
    """
    gateways: those that run; the entry tries them in this order.
    """

    def __init__(self, model_path: str, folder: Path, hosts: tuple[Host, ...], key_file: Path):
        self.hosts = hosts
        self.gateways: list[ServerProcess] = []
        self._model_path, self._table = model_path, folder / "stages.json"
        self._flags = ("--directory", str(self._table), "--stage-key-file", str(key_file))
        self._flags += (
            "--journal",
            f"sqlite:{folder}/journal",
            "--journal-key-file",
            str(key_file),
        )

    def add_gateway(self) -> None:
        policies = "+".join(NAMES)
        gateway = ServerProcess(self._model_path, policies, self._flags, START_TIMEOUT_S)
        self.gateways.append(gateway.__enter__())

    def kill_gateway(self) -> ServerProcess:
        """The one to which the entry leads. It is to be stopped, which takes a moment."""
        gateway = self.gateways.pop(0)
        os.kill(gateway.pid, signal.SIGKILL)
        return gateway

    def stop_gateways(self) -> None:
        for gateway in self.gateways:
            gateway.stop()

    def announce(self, *, draining: Collection[Host] = (), without: Collection[Host] = ()) -> None:
        """Write the table that gateways follow."""
        rows = [
            row
            for host in self.hosts
            if host not in without
            for row in host.rows("draining" if host in draining else "serving")
        ]
        new = self._table.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(Table(tuple(rows))))
        os.replace(new, self._table)

    def wait_until_whole(self) -> None:
        """Every gateway has every replica."""
        names = [
            f'replica="{host.number}",stage="{stage}"' for host in self.hosts for stage in STAGES
        ]
        lines = [f"sglang_live_stage_up{{{name}}} 1.0" for name in names]

        def missing() -> list[str]:
            return [
                f"{line} of gateway {number}"
                for number, gateway in enumerate(self.gateways)
                for text in [gateway.metrics()]
                for line in lines
                if line not in text
            ]

        wait_until(lambda: not missing(), START_TIMEOUT_S, lambda: f"{missing()}\n{self.logs()}")

    def logs(self) -> str:
        """The last lines of each process."""
        return "\n".join(
            [host.log_tail() for host in self.hosts] + [g.log_tail() for g in self.gateways]
        )

    def wait_until_gone(self, host: Host) -> None:
        """No gateway knows its replicas."""
        name = f'sglang_live_stage_up{{replica="{host.number}"'

        def is_gone() -> bool:
            return all(name not in gateway.metrics() for gateway in self.gateways)

        wait_until(is_gone, START_TIMEOUT_S, lambda: f"{name} is gone\n{self.logs()}")

    @asynccontextmanager
    async def entry(self) -> AsyncIterator[str]:
        """Yields the URL of what leads new connections to the first gateway that listens."""
        server = await asyncio.start_server(self._lead, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"ws://127.0.0.1:{port}/v1/realtime"
        finally:
            server.close()

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for gateway in list(self.gateways):
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                ways = (_pass_on(reader, far_writer), _pass_on(far_reader, writer))
                await asyncio.gather(*ways)
                return
        writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextmanager
def running_fleet(model_path: str) -> Iterator[Fleet]:
    end_like_ctrl_c()
    with tempfile.TemporaryDirectory(prefix="sglang_live_") as name, ExitStack() as running:
        folder = Path(name)
        key_file = folder / "key"
        key_file.touch(0o600)
        key_file.write_text(secrets.token_hex(32), "utf-8")
        hosts = tuple(Host(number, model_path, folder, key_file) for number in range(2))
        for host in hosts:
            running.enter_context(host)
        for host in hosts:
            host.wait_until_up()
        fleet = Fleet(model_path, folder, hosts, key_file)
        fleet.announce()
        running.callback(fleet.stop_gateways)
        for _ in range(2):
            fleet.add_gateway()
        fleet.wait_until_whole()
        yield fleet
