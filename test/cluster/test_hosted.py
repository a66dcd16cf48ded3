"""A host's process, without Ray: its stages are reached from elsewhere, and end with it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest

from sglang_live.cluster.child import MARK, environment_of
from sglang_live.cluster.hosted import HostNews, StagesOrder
from sglang_live.stages.transport.protocol import protocol_hash

pytestmark = [pytest.mark.e2e]

FAKE = Path(__file__).with_name("fake_stages.py")
LIMIT_S = 60.0
# As an actor does it, in a process that can be killed.
ACTOR = """
import os, sys
from sglang_live.cluster.child import Child, environment_of
from sglang_live.cluster.hosted import StagesOrder
import msgspec
order = msgspec.json.decode(sys.argv[1], type=StagesOrder)
child = Child("stages", order, environment_of([], os.environ))
child.run(lambda line: print(line, end="", flush=True))
"""


def until(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


@dataclass
class Host:
    actor: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def until_news(self, holds: Callable[[HostNews], bool]) -> HostNews:
        assert self.actor.stdout is not None
        for line in self.actor.stdout:
            self.lines.append(line)
            if line.startswith(MARK):
                news = msgspec.json.decode(line.removeprefix(MARK), type=HostNews)
                if holds(news):
                    return news
        raise AssertionError("".join(self.lines))

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.actor.pid).children(recursive=True)


@pytest.fixture
def host(tmp_path) -> Iterator[Host]:
    order = StagesOrder(
        argv=["--model-path", "demo"],
        stages=["talker", "vocoder"],
        address="127.0.0.1",
        command=[sys.executable, str(FAKE), str(tmp_path)],
    )
    command = [sys.executable, "-c", ACTOR, msgspec.json.encode(order).decode()]
    environment = {**os.environ, "RAY_LEAKED": "1", "CUDA_VISIBLE_DEVICES": "3"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, env=environment) as actor:
        host = Host(actor)
        yield host
        left = host.processes() if actor.poll() is None else []
        actor.kill()
        for process in left:
            until(lambda process=process: not is_alive(process), "it ends with the actor")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_it_tells_where_its_stages_are_and_of_which_protocol(host, tmp_path):
    news = host.until_news(lambda news: news.is_up)
    assert [replica.stage for replica in news.replicas] == ["talker", "vocoder"]
    assert all(replica.address.startswith("tcp://127.0.0.1:") for replica in news.replicas)
    assert news.protocol == protocol_hash()
    assert (tmp_path / "environment").read_text() == "[] "


def test_all_of_it_ends_with_an_actor_that_is_killed(host):
    host.until_news(lambda news: news.is_up)
    processes = host.processes()
    assert len(processes) == 3, "the host and two stages"
    host.actor.kill()
    for process in processes:
        until(lambda process=process: not is_alive(process), f"{process} ends")


def test_a_stage_that_is_killed_starts_again_at_its_address(host, tmp_path):
    before = host.until_news(lambda news: news.is_up)
    [killed] = [p for p in host.processes() if before.replicas[0].address in " ".join(p.cmdline())]
    os.kill(killed.pid, signal.SIGKILL)
    host.until_news(lambda news: not news.replicas[0].is_up)
    again = host.until_news(lambda news: news.is_up)
    assert [r.address for r in again.replicas] == [r.address for r in before.replicas]


def test_a_host_that_others_reach_without_a_key_does_not_start(tmp_path):
    order = {"argv": ["--model-path", "demo"], "stages": ["talker"], "command": []}
    command, pipe = [sys.executable, "-m", "sglang_live.cluster.hosted", "stages"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True) as host:
        host.stdin.write(json.dumps(order | {"address": "192.0.2.1"}) + "\n")
        host.stdin.flush()  # and left open
        assert host.wait(LIMIT_S) == 2
        assert "without a key" in host.stderr.read()


def test_the_environment_of_a_child_has_the_gpus_of_its_actor_and_nothing_else_of_ray():
    own = {"RAY_ADDRESS": "x", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "HOME": "/root"}
    assert environment_of(["2", "3"], own) == {"CUDA_VISIBLE_DEVICES": "2,3", "HOME": "/root"}
