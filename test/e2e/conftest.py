"""The whole server, started once for all tests of this folder, with each of two models."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_live.policy.policies import POLICIES
from sglang_live.stages.ports import free_port

START_TIMEOUT_S = 180
# Gauges of sessions' resources in the stages; all zero without sessions. Cached prefixes are free.
HELD = (
    ("thinker", "sessions"),
    ("thinker", "requests_running"),
    ("thinker", "requests_waiting"),
    ("thinker", "jobs"),
    ("thinker", "kv_tokens_used"),
    ("talker", "sessions"),
    ("talker", "replies"),
    ("talker", "requests_running"),
    ("talker", "jobs"),
    ("talker", "kv_tokens_used"),
    ("vocoder", "streams"),
    ("vocoder", "jobs"),
)
DATA = Path(__file__).parents[1] / "data" / "audio"
TELEPHONY_TOKEN = "12345"
# A voice with random weights ends after any number of seconds; only a long text allows that many.
SENTENCES = " ".join(6 * ["Good morning to you, and to all who listen."])


@dataclass
class Server:
    """headers: of requests, if it needs a key."""

    process: subprocess.Popen
    port: int
    log_dir: Path
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/realtime"

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.http}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _metrics(self) -> str:
        return httpx.get(f"{self.http}/metrics", headers=self.headers, timeout=5).text

    def stage_load(self, stage: str, what: str) -> float:
        """A gauge from /metrics."""
        label = f'sglang_live_stage_load{{replica="0",stage="{stage}",what="{what}"}}'
        for line in self._metrics().splitlines():
            if line.startswith(label):
                return float(line.split()[-1])
        raise KeyError(label)

    def stage_starts(self) -> dict[str, float]:
        """Number of starts of each stage: 1 unless it died."""
        lines = self._metrics().splitlines()
        starts = [x for x in lines if x.startswith("sglang_live_stage_starts{")]
        return {re.search(r'stage="(\w+)"', x)[1]: float(x.split()[-1]) for x in starts}

    def speculative_turns(self) -> dict[str, float]:
        """Number of speculative turns by outcome."""
        metrics = self._metrics()
        name = r'speculative_turns_total\{outcome="(\w+)"\} (\S+)'
        found = {outcome: float(n) for outcome, n in re.findall(name, metrics)}
        return {"answered": 0.0, "withdrawn": 0.0, **found}

    def pause_words(self) -> dict[str, float]:
        """Number of pauses by what their words say."""
        metrics = self._metrics()
        found = re.findall(r'pause_words_total\{says="(\w+)"\} (\S+)', metrics)
        return {"goes_on": 0.0, "none": 0.0, "failed": 0.0} | {k: float(n) for k, n in found}

    def wait_until_free(self) -> None:
        """Fail if resources are still in use some seconds after the end of all sessions."""
        # The stages' figures arrive with a ping every two seconds.
        for stage, what in HELD:
            wait_until(lambda s=stage, w=what: self.stage_load(s, w) == 0, 15, f"{stage} {what}")
        metrics = self._metrics()
        assert "sglang_live_gateway_sessions_open 0.0" in metrics

    def stage_process(self, stage: str) -> psutil.Process:
        """The stage's own process, not SGLang's child processes."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if " ".join(child.cmdline()).startswith(f"sglang_live::{stage}/"):
                return child
        raise LookupError(stage)


def wait_until(claim, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


@contextmanager
def running_server(
    model_path: str,
    log_dir: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    program: tuple[str, ...] = (sys.executable, "-m", "sglang_live.launch_server"),
) -> Iterator[Server]:
    """A separate server, with the model name `demo`.

    folder: in which it runs; None: this one.
    """
    port = free_port()
    command = [*program, "--model-path", model_path, "--served-model-name", "demo"]
    command += ["--port", str(port), "--log-dir", str(log_dir), "--max-sessions", "16"]
    # Without admission control, no session is refused because the machine is slow.
    command += [
        "--live-policies",
        ",".join(p for p in POLICIES if p not in ("admission", "arbiter")),
    ]
    command += flags
    with (log_dir / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            umask=0o022,  # a common umask: the server must restrict its files by itself
        )
    running = Server(process, port, log_dir)
    try:

        def is_up() -> bool:
            text = (log_dir / "server.log").read_text()
            assert process.poll() is None, f"server ended:\n{text}"
            return running.is_healthy()

        wait_until(is_up, start_timeout_s, "server healthy")
        yield running
    finally:
        children = []
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
        # Twice: the first signal drains, the second ends at once.
        process.terminate()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        for child in alive:
            child.kill()
        assert not alive, f"left behind: {[c.cmdline() for c in alive]}"


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """A server of the demo model with random weights: responses of any length to any input."""
    with running_server("demo-random", tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def talking(tmp_path_factory) -> Iterator[Server]:
    """A server of the trained demo model, which answers calls."""
    flags = ("--telephony-token", TELEPHONY_TOKEN, "--telephony-keys-as-text")
    with running_server("demo", tmp_path_factory.mktemp("talking"), *flags) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def quiet_proxies() -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ.pop(name, None)
