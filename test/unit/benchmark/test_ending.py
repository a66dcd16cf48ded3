"""Claims about what a benchmark leaves behind when it ends: nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Both hold the pipe of stdout open, whose end says that both have ended.
BENCHMARK = """
import os, subprocess, sys, time
from contextlib import contextmanager
from benchmark.ending import end_like_ctrl_c, tied

@contextmanager
def server():
    end_like_ctrl_c()
    code = "import time; print('up', flush=True); time.sleep(600)"
    started = subprocess.Popen(tied([sys.executable, "-c", code], os.getpid()))
    try:
        yield
    finally:
        started.terminate()
        started.wait()
        print("stopped", flush=True)

with server():
    time.sleep(600)
"""


def ended_by(number: int) -> list[str]:
    """Lines of a benchmark, and of the server that it starts, which a signal ends."""
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/python:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "up\n"
        benchmark.send_signal(number)
        return benchmark.stdout.read().splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_a_benchmark_stop_what_it_started(number):
    assert ended_by(number) == ["stopped"]


def test_a_killed_benchmark_leaves_no_server():
    assert ended_by(signal.SIGKILL) == []
