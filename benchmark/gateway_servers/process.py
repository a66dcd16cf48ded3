"""A server process of the comparison: started, asked for its CPU time, stopped."""

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
ROOT = Path(__file__).parents[2]


class ServerProcess:
    """Context manager around `python -m benchmark.gateway_servers.NAME ARGS`.

    url: where callers connect.
    """

    def __init__(self, name: str, *args: object):
        module = f"benchmark.gateway_servers.{name}"
        self._command = [sys.executable, "-m", module, *map(str, args)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        try:
            self.url = f"ws://127.0.0.1:{self._port()}/v1/realtime"
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

    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        # After the name, which may hold anything but is the last thing in parentheses.
        fields = stat.rpartition(")")[2].split()
        user_ticks, system_ticks = int(fields[11]), int(fields[12])
        return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")

    def _port(self) -> int:
        # Reading a pipe cannot time out, waiting for a thread that reads it can.
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
