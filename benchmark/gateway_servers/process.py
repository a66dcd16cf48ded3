"""A server process of the comparison: start, CPU time, memory, stop."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self
from urllib.request import urlopen

from benchmark.ending import end_like_ctrl_c, tied

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
ROOT = Path(__file__).parents[2]


class ServerProcess:
    """Context manager around `python -m benchmark.gateway_servers.NAME ARGS`.

    url: address of the server's socket.
    """

    def __init__(self, name: str, *args: object):
        module = f"benchmark.gateway_servers.{name}"
        self._command = [sys.executable, "-m", module, *map(str, args)]

    def __enter__(self) -> Self:
        end_like_ctrl_c()
        self._process = subprocess.Popen(
            tied(self._command, os.getpid()),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        try:
            self._address = f"127.0.0.1:{self._port()}"
            self.url = f"ws://{self._address}/v1/realtime"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system time of all its threads since its start."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text("utf-8")
        # The fields after the name, which may contain any character and ends with the last ")".
        fields = stat.rpartition(")")[2].split()
        user_ticks, system_ticks = int(fields[11]), int(fields[12])
        return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text("utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def lag_ms(self) -> list[float]:
        """P50, P99 and the worst lag of its event loop since the last call."""
        with urlopen(f"http://{self._address}/lag", timeout=START_TIMEOUT_S) as answer:
            return json.load(answer)

    def _port(self) -> int:
        # Reading a pipe has no timeout; waiting for a thread that reads it has.
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(
            target=lambda: lines.put(self._process.stdout.readline()), daemon=True
        )
        reader.start()
        try:
            line = lines.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError(f"no port within {START_TIMEOUT_S:.0f} s") from None
        if not line.strip():
            raise RuntimeError(f"{self._command[2]} ended with {self._process.wait()}")
        return int(line)
