"""The network between a gateway and a host is cut, without a word to either, and heals.

Real gateway, hosts and transport, stages without engines; neither Ray nor root is needed.
"""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from sglang_live.cluster.child import MARK
from sglang_live.cluster.hosted import HostNews, StagesOrder
from sglang_live.orchestrator.directory import Table, TableRow
from test.cluster.conftest import FREED_WITHIN_S, HERE, STAGES
from test.cluster.test_chaos import check_equal, session_of
from test.e2e.conftest import Server, running_server
from test.unit.client.cutter import Cutter

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

START_S = 120.0
# Less than the patience with a silent host.
BLINK_S = 0.8


@dataclass
class Host:
    """news: what it has told last."""

    process: subprocess.Popen[str]
    news: HostNews = field(default_factory=HostNews)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.news = msgspec.json.decode(line.removeprefix(MARK), type=HostNews)


@contextmanager
def running_host(folder: Path, key: Path) -> Iterator[Host]:
    """A host of fake stages, as a cluster has it."""
    folder.mkdir()
    order = StagesOrder(
        argv=["--model-path", "demo", "--stage-key-file", str(key)],
        stages=list(STAGES),
        address="127.0.0.1",
        command=[sys.executable, str(HERE / "fake_stages.py"), str(folder)],
    )
    command, pipe = [sys.executable, "-m", "sglang_live.cluster.hosted", "stages"], subprocess.PIPE
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
    ):
        host = Host(process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        process.stdin.flush()
        threading.Thread(target=host.read, daemon=True).start()
        try:
            until(lambda: host.news.is_up, START_S, (folder / "log").read_text)
            yield host
        finally:
            process.stdin.close()


def until(holds, limit_s: float, what) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what()}"
        time.sleep(0.05)


@dataclass
class Fleet:
    """lines: the network between the gateway and the first host."""

    gateway: Server
    lines: list[Cutter]

    @property
    def ws(self) -> str:
        return self.gateway.ws

    async def cut(self) -> None:
        for line in self.lines:
            line.flows.clear()

    def heal(self) -> None:
        for line in self.lines:
            line.flows.set()

    def metrics(self) -> str:
        return httpx.get(f"{self.gateway.http}/metrics", timeout=30).text

    def lost_jobs(self) -> dict[tuple[str, str], float]:
        line = r'sglang_live_lost_jobs_total\{outcome="(\w+)",stage="(\w+)"\} (\S+)'
        found = re.findall(line, self.metrics())
        return {(stage, outcome): float(n) for outcome, stage, n in found}

    async def until_whole(self) -> None:
        names = [f'{{replica="{n}",stage="{stage}"}}' for n in (0, 1) for stage in STAGES]
        lines = [f"sglang_live_stage_up{name} 1.0" for name in names]
        await asyncio.to_thread(
            until, lambda: all(line in self.metrics() for line in lines), START_S, self.metrics
        )

    async def until_free(self) -> None:
        """No stage holds anything of any session."""
        line = r'stage_load\{.*what="(?:sessions|jobs)"\} (\S+)'

        def is_free() -> bool:
            held = re.findall(line, self.metrics())
            return len(held) == 2 * 2 * len(STAGES) and all(float(n) == 0 for n in held)

        await asyncio.to_thread(until, is_free, FREED_WITHIN_S, self.metrics)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("cut")
    key, table = folder / "key", folder / "stages.json"
    key.touch(0o600)
    key.write_text(os.urandom(32).hex(), "utf-8")
    async with AsyncExitStack() as running:
        lines, rows = [], []
        for number in (0, 1):
            starting = running_host(folder / str(number), key)
            host = await asyncio.to_thread(starting.__enter__)
            running.push_async_callback(asyncio.to_thread, starting.__exit__, None, None, None)
            for replica in host.news.replicas:
                address = replica.address
                if number == 0:
                    lines.append(Cutter(address.removeprefix("tcp://")))
                    near = await running.enter_async_context(lines[-1].listening())
                    address = f"tcp://{near}"
                rows.append(
                    TableRow(
                        replica=f"{replica.stage}/{number}",
                        address=address,
                        protocol=host.news.protocol,
                    )
                )
        table.write_bytes(msgspec.json.encode(Table(tuple(rows))))
        flags = ("--directory", str(table), "--stage-key-file", str(key))
        serving = running_server("demo", folder, *flags, start_timeout_s=START_S)
        gateway = await asyncio.to_thread(serving.__enter__)
        running.push_async_callback(asyncio.to_thread, serving.__exit__, None, None, None)
        fleet = Fleet(gateway, lines)
        await fleet.until_whole()
        yield fleet


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("idle", marks=pytest.mark.nightly),
        pytest.param("before the first audio", marks=pytest.mark.nightly),
        "in audio",
    ],
)
async def test_a_session_goes_on_when_a_host_is_cut_off_and_all_is_freed_when_it_is_back(
    fleet, moment
):
    before = fleet.lost_jobs()
    try:
        found = await session_of(fleet, moment, fleet.cut)
    finally:
        fleet.heal()
    print(f"\ncut, {moment}: {found.waited_s:.2f} s without audio")
    moved = {key for key, n in fleet.lost_jobs().items() if n > before.get(key, 0)}
    assert moved and {outcome for _, outcome in moved} == {"moved"}
    await fleet.until_whole()
    await fleet.until_free()
    undisturbed = await session_of(fleet, moment)
    check_equal(found, undisturbed, moment)


async def test_a_cut_that_heals_at_once_moves_nothing(fleet):
    async def blink() -> None:
        await fleet.cut()
        asyncio.get_running_loop().call_later(BLINK_S, fleet.heal)

    before = fleet.lost_jobs()
    found = await session_of(fleet, "in audio", blink)
    assert fleet.lost_jobs() == before
    check_equal(found, await session_of(fleet, "in audio"), "in audio")
    await fleet.until_free()
