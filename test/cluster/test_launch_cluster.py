"""launch_cluster from end to end, with a Ray of its own."""

import json
import re
import signal
import subprocess
import threading

import psutil
import pytest

from test.cluster.conftest import ENVIRONMENT, HERE, RAY_PYTHON, START_S
from test.e2e.socket_client import connected, is_whole

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

SPEC = """
model_path = "demo"
zones = ["a"]

[[hosts]]
name = "all"
stages = ["thinker", "talker", "vocoder"]
command = {command}

[gateways]
port = 0
"""
COMMAND = [RAY_PYTHON, "-m", "sglang_live.launch_cluster"]


@pytest.fixture
def file(tmp_path):
    command = [str(RAY_PYTHON), str(HERE / "fake_stages.py"), str(tmp_path)]
    path = tmp_path / "cluster.toml"
    path.write_text(SPEC.format(command=json.dumps(command)))
    return path


async def test_a_cluster_on_one_machine_serves_and_ends_with_its_program(file):
    with subprocess.Popen(
        [*COMMAND, file, "--address", "local"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    ) as program:
        limit = threading.Timer(START_S, program.kill)
        limit.start()
        try:
            said: list[str] = []
            url = None
            while url is None:
                said.append(program.stdout.readline())
                assert said[-1], "".join(said)
                found = re.match(r"gateways-\d+ serving (\S+)", said[-1])
                url = found and found[1]
            assert "its safety is not checked" in said[0]
            async with connected(url.replace("http", "ws", 1) + "/v1/realtime") as session:
                assert is_whole(await session.ask("hello"))
            started = psutil.Process(program.pid).children(recursive=True)
            assert len(started) > 5
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0
            _, alive = psutil.wait_procs(started, timeout=30)
            assert [process.cmdline() for process in alive] == []
        finally:
            limit.cancel()
            if program.poll() is None:
                program.kill()


def test_without_a_ray_there_is_a_plain_error(file):
    told = subprocess.run(
        [*COMMAND, file, "--address", "127.0.0.1:9"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=START_S,
    )
    assert told.returncode == 1 and "error: no Ray at 127.0.0.1:9" in told.stderr, told.stderr
