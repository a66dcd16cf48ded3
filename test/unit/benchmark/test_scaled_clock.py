"""Sleeps and timeouts under scaled clocks last that many times as long in real time."""

import json
import subprocess
import sys

import pytest

from benchmark.scaled_clock.__main__ import compiled, environment, main

DIVISOR = 3
WAIT_S = 0.1

# Prints the real and the scaled duration of each wait. The uptime is the kernel's.
WAITS = """
import asyncio, json, queue, select, threading, time
import uvloop, zmq

def uptime_s():
    return float(open("/proc/uptime").read().split()[0])

def taken(name, wait):
    real, scaled, wall = uptime_s(), time.monotonic(), time.time()
    wait()
    print(json.dumps([name, uptime_s() - real, time.monotonic() - scaled, time.time() - wall]))

def empty(get):
    try:
        get()
    except queue.Empty:
        pass

held = threading.Lock()
held.acquire()
socket = zmq.Context().socket(zmq.PULL)
socket.bind("inproc://waits")
poll = select.poll()
taken("sleep", lambda: time.sleep(WAIT))
taken("event", lambda: threading.Event().wait(WAIT))
taken("lock", lambda: held.acquire(timeout=WAIT))
taken("queue", lambda: empty(lambda: queue.Queue().get(timeout=WAIT)))
taken("poll", lambda: poll.poll(WAIT * 1000))
taken("epoll", lambda: select.epoll().poll(WAIT))
taken("select", lambda: select.select([], [], [], WAIT))
taken("asyncio", lambda: asyncio.run(asyncio.sleep(WAIT)))
taken("uvloop", lambda: uvloop.run(asyncio.sleep(WAIT)))
taken("zmq", lambda: socket.poll(WAIT * 1000))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("clock"))


def run(library, script: str) -> list[str]:
    command = [sys.executable, "-c", script]
    env = environment(DIVISOR, library)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_waits_last_that_many_times_as_long(library):
    waits = [json.loads(line) for line in run(library, f"WAIT = {WAIT_S}\n{WAITS}")]
    assert len(waits) == 10
    for name, real_s, scaled_s, wall_s in waits:
        # The uptime counts hundredths; a busy machine wakes up later, never earlier.
        assert real_s > DIVISOR * WAIT_S - 0.02, (name, real_s)
        assert scaled_s > WAIT_S - 0.002, (name, scaled_s)
        assert real_s > DIVISOR * scaled_s - 0.05, (name, real_s, scaled_s)
        assert wall_s == pytest.approx(scaled_s, abs=0.05), (name, wall_s)


def test_processes_of_one_benchmark_agree_on_the_time(library):
    child = "import time; print(time.monotonic(), time.time())"
    script = f"""
import subprocess, sys, time
before = time.monotonic(), time.time()
told = subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True).stdout
after = time.monotonic(), time.time()
print(all(a <= float(t) <= b for a, t, b in zip(before, told.split(), after)))
"""
    assert run(library, script) == ["True"]


@pytest.mark.parametrize("arguments", [[], ["4"], ["0", "voice_load"], ["x", "voice_load"]])
def test_a_command_without_divisor_or_benchmark_is_refused(arguments, capsys):
    assert main(arguments) == 2
    assert "usage" in capsys.readouterr().err
