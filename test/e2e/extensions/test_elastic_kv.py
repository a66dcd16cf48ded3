"""A server with elastic KV pools whose own process, which moves the memory, stops or dies."""

import os
import random
import re
import signal
import threading
import time

import httpx
import psutil
import pytest

from test.e2e.conftest import Server, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

POOL_TOKENS = 1024
FLAGS = ("--elastic-kv", "--thinker.max-total-tokens", "1024", "--talker.max-total-tokens", "32768")
STOPPED_S = 8.0


@pytest.fixture
def elastic(tmp_path):
    with running_server("demo-random", tmp_path, *FLAGS) as running:
        yield running


def ask(server: Server, n_tokens: int, n_output: int = 4) -> httpx.Response:
    rng = random.Random(n_tokens)
    sampling = {"max_new_tokens": n_output, "temperature": 0, "ignore_eos": True}
    ids = [rng.randrange(10, 200) for _ in range(n_tokens)]
    body = {"input_ids": ids, "sampling_params": sampling}
    return httpx.post(f"{server.http}/generate", json=body, timeout=180)


def moved(server: Server, what: str) -> float:
    metrics = httpx.get(f"{server.http}/metrics", timeout=5).text
    return float(re.search(rf'sglang_live_kv_mover\{{what="{what}"\}} (\S+)', metrics)[1])


def test_engines_outlast_a_server_that_stops_and_end_with_one_that_is_killed(elastic):
    answer = ask(elastic, 6 * POOL_TOKENS)
    assert answer.status_code == 200, answer.text
    assert moved(elastic, "moves_urgent") >= 1
    sizes = [moved(elastic, f"{stage}_granules") for stage in ("thinker", "talker")]

    # The thinker is at work while the mover does not read what it needs.
    found: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: found.append(ask(elastic, 400, 600)))
    asking.start()
    time.sleep(0.5)
    os.kill(elastic.process.pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(elastic.process.pid, signal.SIGCONT)
    asking.join(120)
    assert found[0].status_code == 200, found[0].text
    answer = ask(elastic, 9 * POOL_TOKENS)  # more than before: memory moves again
    assert answer.status_code == 200, answer.text
    assert elastic.stage_starts() == {"thinker": 1, "talker": 1, "vocoder": 1}
    assert sum(moved(elastic, f"{s}_granules") for s in ("thinker", "talker")) == sum(sizes)

    processes = psutil.Process(elastic.process.pid).children(recursive=True)
    os.kill(elastic.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
