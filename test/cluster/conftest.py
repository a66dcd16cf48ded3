"""A cluster for all tests here: Ray with fake nodes, real gateways, stages without engines."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from test.store_server import StoreServer

ROOT = Path(__file__).parents[2]
# Ray is no part of the environment in which the server runs.
RAY_PYTHON = ROOT / ".venv-cluster" / "bin" / "python"
HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # Longer than a head is away here.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "120",
    # On a busy machine a node takes longer than Ray's 30 s.
    "RAY_raylet_start_wait_time_s": "300",
}
STAGES = ("thinker", "talker", "vocoder")
ZONES = ("a", "b")
# Ray's start, and that of a host elsewhere, on a machine that is busy with other things.
START_S = 300.0
FREED_WITHIN_S = 30.0
_UP = re.compile(r'sglang_live_stage_up\{replica="(\d+)",stage="(\w+)"\} 1\.0')
_HELD = re.compile(r'sglang_live_stage_load\{.*what="(?:sessions|jobs)"\} (\S+)')

SPEC = """
model_path = "demo"
stage_key_file = "{key}"
zones = ["a", "b"]
zone_label = "zone"
drain_s = 60.0
flags = ["--live-policies", "truncate,urgency,pacing"]

[[hosts]]
name = "think"
stages = ["thinker"]
command = {command}

[[hosts]]
name = "voice"
stages = ["talker", "vocoder"]
flags = {voice_flags}
command = {command}
{voice_scaling}

[gateways]
count = {n_gateways}
cpus = 4.0
port = 0
flags = [
    "--max-sessions=16", "--drain-s=2", "--shared-limits={store}", "--journal={store}",
    "--journal-key-file={key}",
]
"""


@dataclass
class Cluster:
    """
    folder: of what fake_stages.py leaves.
    store: of journal and shared limits. Ray's head has another one.
    """

    nodes: subprocess.Popen[str]
    folder: Path
    store: StoreServer
    gateways: tuple[str, ...] = ()

    def do(self, name: str, *values: str):
        """A method of ray_nodes.Nodes."""
        assert self.nodes.stdin is not None and self.nodes.stdout is not None
        self.nodes.stdin.write(json.dumps([name, *values]) + "\n")
        self.nodes.stdin.flush()
        answer = json.loads(self.nodes.stdout.readline())
        assert "error" not in answer, answer
        return answer["value"]

    def apply(
        self, *, n_gateways: int = 1, voice_flags: tuple[str, ...] = (), voice_scaling: str = ""
    ) -> None:
        """Have the cluster be so. Returns before it is."""
        command = [str(RAY_PYTHON), str(HERE / "fake_stages.py"), str(self.folder)]
        path = self.folder / "cluster.toml"
        path.write_text(
            SPEC.format(
                key=self.folder / "stage.key",
                command=json.dumps(command),
                voice_flags=json.dumps(voice_flags),
                voice_scaling=voice_scaling,
                n_gateways=n_gateways,
                store=self.store.url,
            )
        )
        self.do("apply", str(path))

    def status(self) -> dict[str, dict]:
        return {one["name"]: one for one in self.do("status")}

    def rows(self) -> dict[str, list]:
        """Of the table, by host."""
        return {name: one["replicas"] for name, one in self.status().items()}

    def until_serving(self, n: int = 5) -> None:
        """n hosts and gateways serve, and the gateways know all stages of both zones. They have
        room: one that was paused, or is new on a busy machine, refuses sessions for a while.
        """

        def serves() -> bool:
            status = self.status()
            self.gateways = tuple(one["url"] for one in status.values() if one["url"])
            states = [one["state"] for one in status.values()]
            if states != ["serving"] * n:
                return False
            return all(
                len(_UP.findall(self.metrics(gateway))) == len(ZONES) * len(STAGES)
                and httpx.get(f"{gateway}/v1/capacity", timeout=30).json()["sessions"]["more"]
                for gateway in self.gateways
            )

        self.until(serves, START_S, lambda: f"all serve: {self.status()}")

    def until(self, holds, limit_s: float, what) -> None:
        deadline_s = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what()}"
            time.sleep(0.1)

    def until_free(self) -> None:
        """No stage holds anything of any session."""

        def is_free() -> bool:
            held = _HELD.findall(self.metrics())
            return bool(held) and all(float(n) == 0 for n in held)

        self.until(is_free, FREED_WITHIN_S, lambda: f"all is free: {self.metrics()}")

    def metrics(self, gateway: str = "") -> str:
        return httpx.get(f"{gateway or self.gateways[0]}/metrics", timeout=30).text

    def lost_jobs(self) -> dict[tuple[str, str], float]:
        line = r'sglang_live_lost_jobs_total\{outcome="(\w+)",stage="(\w+)"\} (\S+)'
        found = re.findall(line, self.metrics())
        return {(stage, outcome): float(n) for outcome, stage, n in found}

    def pid_of(self, stage: str) -> int:
        """Of the process that began the latest job of the stage."""
        return int((self.folder / stage).read_text())

    @property
    def ws(self) -> str:
        return self.gateways[0].replace("http", "ws", 1) + "/v1/realtime"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    key = folder / "stage.key"
    key.write_bytes(os.urandom(32).hex().encode())
    key.chmod(0o600)
    stores = []
    for name in ("store", "ray_store"):
        (folder / name).mkdir()
        stores.append(StoreServer(folder / name))
        stores[-1].start()
    store, ray_store = stores
    with (folder / "nodes.log").open("w") as log:
        nodes = subprocess.Popen(
            [RAY_PYTHON, HERE / "ray_nodes.py", *ZONES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**ENVIRONMENT, "RAY_REDIS_ADDRESS": f"127.0.0.1:{ray_store.port}"},
        )
    running = Cluster(nodes, folder, store)
    try:
        assert nodes.stdout is not None and nodes.stdin is not None
        first = nodes.stdout.readline()
        assert first, (folder / "nodes.log").read_text()
        print(f"\nRay's nodes were up after {json.loads(first)['up_s']:.1f} s")
        running.apply()
        running.until_serving()
        yield running
    finally:
        nodes.stdin.close()
        try:
            nodes.wait(60)
        except subprocess.TimeoutExpired:
            nodes.send_signal(signal.SIGKILL)
            nodes.wait()
        for store in stores:
            store.kill()
