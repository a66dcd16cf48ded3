"""A server for one run: start, wait until healthy, stop."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

from benchmark.ending import end_like_ctrl_c, tied
from lab.random_model.folder import is_random_model
from sglang_live.devices import may_have_gpu
from sglang_live.policy.policies import POLICIES

HEALTH_POLL_S = 0.25
TERM_GRACE_S = 15.0
LOG_TAIL_LINES = 30


class ServerError(RuntimeError):
    """The server did not start; the message ends with the last lines of its log."""


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


LAUNCH_SERVER = "sglang_live.launch_server"
# At the end of an arm: both engines without SGLang's overlap, the baseline with the earliest first
# audio where stages share a device.
NO_OVERLAP = "no-overlap"
# An arm: SGLang alone, whose clients send the whole conversation with each turn.
STOCK = "stock"


def command(
    model_path: str,
    policies: str,
    port: int,
    server_args: tuple[str, ...],
    module: str = LAUNCH_SERVER,
) -> list[str]:
    """The launch command of an arm.

    `all` are all policies except `admission`: the workload determines the number of sessions. As
    the server's own `all`, it has turns on a device only where that is a GPU, or modelled.
    `default` gives no policies, as a user does.
    """
    if module == LAUNCH_SERVER and any(arg.startswith("--device-model") for arg in server_args):
        module = "lab.launch_server"
    takes_turns = module != LAUNCH_SERVER or may_have_gpu()
    if module == LAUNCH_SERVER and is_random_model(Path(model_path)):
        module = "lab.launch_server"
    place = ["--model-path", model_path, "--host", "127.0.0.1", "--port", str(port)]
    without = {"admission"} if takes_turns else {"admission", "arbiter"}
    names = ",".join(name for name in POLICIES if name not in without)
    plain = policies.removesuffix(f"+{NO_OVERLAP}")
    if plain != policies:
        engines = ("thinker", "talker")
        server_args = (*(f"--{one}.disable-overlap-schedule" for one in engines), *server_args)
        policies = plain
    if policies == STOCK:
        policies, module, server_args = "off", "lab.launch_server", ("--stateless", *server_args)
    arm = ["--live-policies", names if policies == "all" else policies.replace("+", ",")]
    program = [sys.executable, "-m", module]
    return [*program, *place, *(arm if policies != "default" else ()), *server_args]


class ServerProcess:
    """Context manager around one server process and everything it starts."""

    def __init__(
        self,
        model_path: str,
        policies: str,
        server_args: tuple[str, ...],
        timeout_s: float,
        module: str = LAUNCH_SERVER,
    ):
        self.port = free_port()
        self.command = command(model_path, policies, self.port, server_args, module)
        self.start_s = 0.0
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.NamedTemporaryFile(prefix="sglang_live_", suffix=".log")  # noqa: SIM115

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/realtime"

    def __enter__(self) -> Self:
        began_s = time.monotonic()
        end_like_ctrl_c()
        # A process group can be stopped as a whole. It is no session: Linux may schedule sessions
        # as units, and users and server then block each other's cores (sched(7), autogroup).
        self._process = subprocess.Popen(
            tied(self.command, os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            self._wait_until_healthy(began_s + self._timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - began_s
        return self

    def __exit__(self, *_exc) -> None:
        self.stop()

    def stop(self) -> None:
        """Send SIGTERM to the server, which stops its stages; then SIGKILL to the rest."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TERM_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None
        self._log.close()

    def metrics(self) -> str:
        """The text of /metrics; empty if the server does not respond."""
        try:
            with self._get("/metrics") as answer:
                return answer.read().decode()
        except (urllib.error.URLError, OSError):
            return ""

    def log_tail(self) -> str:
        lines = Path(self._log.name).read_text("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _wait_until_healthy(self, deadline_s: float) -> None:
        while not self._is_healthy():
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"the server exited with {code} at start\n{self.log_tail()}")
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"the server was not healthy within {self._timeout_s:.0f} s\n{self.log_tail()}"
                )
            time.sleep(HEALTH_POLL_S)

    def _is_healthy(self) -> bool:
        try:
            with self._get("/health") as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _get(self, path: str):
        # No proxy: the server is on loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(f"http://127.0.0.1:{self.port}{path}", timeout=2.0)
