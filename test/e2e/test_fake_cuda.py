"""The whole server on the platform of CUDA, with a device that is only pretended.

SGLang's Triton kernels, graphs of prefill, decode and the vocoder, native operators: the paths of a
GPU without sgl-kernel, with the arithmetic of a CPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_live.extensions.planner.device_model.model import load_device_model
from test.e2e.conftest import running_server
from test.e2e.socket_client import NO_VAD, connected

FAKE_CUDA = Path(__file__).parents[1] / "fake_cuda"
sys.path.insert(0, str(FAKE_CUDA))
from fake_cuda import ENVIRONMENT  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

# Interpreted kernels: a capture takes minutes for every size, a frame half a second.
FLAGS = [
    f"--{stage}.{flag}"
    for stage in ("thinker", "talker")
    for flag in (
        "cuda-graph-bs-decode=1",
        "cuda-graph-backend-prefill=breakable",
        "cuda-graph-bs-prefill=32",
        "max-total-tokens=8192",
        "max-running-requests=4",
    )
]
START_TIMEOUT_S = 400
TURN_TIMEOUT_S = 200
QUESTION = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "What is the capital of France?"}],
}


async def test_the_server_talks_on_the_platform_of_cuda(tmp_path):
    server = running_server(
        "demo", tmp_path, *FLAGS, environment=ENVIRONMENT, start_timeout_s=START_TIMEOUT_S
    )
    with server as running:
        async with connected(running.ws) as socket:
            await socket.session(**NO_VAD)
            await socket.send("conversation.item.create", item=QUESTION)
            await socket.send("response.create")
            done = await socket.until("response.done", timeout_s=TURN_TIMEOUT_S)
        [item] = done["response"]["output"]
        assert item["content"][0]["transcript"].strip() == "Paris is the capital of France."
        # The stages' figures arrive with a ping every two seconds.
        assert running.stage_load("vocoder", "graph_failed_captures") == 0
        assert running.stage_load("vocoder", "graph_replays") > 0
        for stage in ("thinker", "talker"):
            # Of prefills: a decode is one graph.
            assert "a segment is replayed" in (tmp_path / f"{stage}-0.log").read_text(), stage


def test_the_check_at_full_size_runs_on_the_platform_of_cuda(tmp_path):
    """Random weights that are made there, an end that is in the talker's graph, and events."""
    paths = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], *filter(None, sys.path)])
    sizes = "--graph-sizes=1,2 --streams=1,2 --prompts=10,30 --contexts=8,20 --rounds=3"
    command = [sys.executable, "-m", "benchmark.gpu", "full_constants", "--device=cuda", "--tiny"]
    command += [*sizes.split(), f"--start-timeout-s={START_TIMEOUT_S}", f"--out={tmp_path}"]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("*.json")
    figures = json.loads(path.read_text())["figures"]
    assert figures["platform"] == "cuda_native"
    assert set(figures["launch_ms"]) == {"thinker", "talker"}
    for part in ("thinker_prefill", "thinker_decode", "talker_decode"):
        assert all(row["ms"] > 0 for row in figures[part])
    [model] = tmp_path.glob("*.toml")
    assert load_device_model(model).n_devices == 1
