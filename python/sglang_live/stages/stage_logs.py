"""Output of stage processes: to a file each, or to the server's own stderr.

A stage writes into a pipe, so that a full disk does not stop it. In: the reading ends. Out: the
files, and the last lines of each process, which explain a failed start.
Owner: one per supervisor, with a thread that reads all pipes.
"""

import logging
import os
import selectors
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sglang_live.telemetry.log_json import as_json_line, text_lines
from sglang_live.telemetry.log_writing import LogDrops, LogWriter

log = logging.getLogger(__name__)

_READ_BYTES = 65_536
_TAIL_LINES = 200
_STDERR = 2
# A terminal or pipe behind the server's stderr may be slow; a stage waits once 64 KiB are unread.
_STDERR_WAIT_S = 0.2


@dataclass(eq=False)
class _Output:
    """The output of one process.

    path: of its file. None: it goes to stderr.
    rest: the incomplete last line.
    fd: of the open file. -1: none.
    tail: the last lines.
    """

    name: str
    path: Path | None
    writer: LogWriter
    as_json: bool = False
    fd: int = -1
    rest: bytes = b""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, data: bytes) -> None:
        whole, newline, self.rest = (self.rest + data).rpartition(b"\n")
        if len(self.rest) > _READ_BYTES:
            whole, newline, self.rest = self.rest, b"\n", b""  # no line is that long
        if newline:
            self._take_lines(whole + newline)

    def _take_lines(self, data: bytes) -> None:
        lines = data.splitlines()
        for line in lines:
            self.tail.extend(text_lines(line))
        if self.as_json:
            # C libraries, and an interpreter that ends, print without the logger.
            data = b"".join(as_json_line(line, self.name) + b"\n" for line in lines if line)
        was_whole = not self.writer.missing
        if not self._write(data) and was_whole:
            log.error("log_dropped log=%s error=%s", self.name, self.writer.error)

    def end(self) -> None:
        if self.rest:
            self._take_lines(self.rest + b"\n")
            self.rest = b""
        self._close()
        self.ended.set()

    def _write(self, data: bytes) -> bool:
        if self.path is None:
            return self.writer.write(_STDERR, data)
        try:
            if self.fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self.fd = os.open(self.path, flags, 0o666)
        except OSError as error:
            return self.writer.failed(data, error)
        if self.writer.write(self.fd, data):
            return True
        self._close()  # the file or its folder may have been removed: open it again next time
        return False

    def _close(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):  # a full disk may raise only now
                os.close(self.fd)
            self.fd = -1


class StageLogs:
    """
    Args:
        log_dir: folder for a file per stage. None: all goes to the server's stderr.
        drops: counts what could not be written.
        as_json: write what is not a JSON object as one.
    """

    def __init__(
        self, log_dir: Path | None, drops: LogDrops | None = None, *, as_json: bool = False
    ):
        self._as_json = as_json
        self._log_dir = log_dir
        self._drops = drops or LogDrops()
        self._outputs: dict[str, _Output] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="stage logs", daemon=True)
        self._thread.start()

    def open(self, name: str) -> int:
        """The writing end for a process that is about to start. Close it once the process has it.

        Raises:
            OSError: there is no descriptor left.
        """
        read, write = os.pipe()
        path = self.path_of(name)
        wait_s = _STDERR_WAIT_S if path is None else 0.0
        output = _Output(name, path, LogWriter(name, self._drops, wait_s=wait_s), self._as_json)
        with self._lock:
            if name in self._outputs:
                output.writer = self._outputs[name].writer  # missing lines are reported once
            self._outputs[name] = output
            self._selector.register(read, selectors.EVENT_READ, output)
        os.write(self._wake_write, b"+")
        return write

    def path_of(self, name: str) -> Path | None:
        return None if self._log_dir is None else self._log_dir / f"{name.replace('/', '-')}.log"

    def last_lines(self, name: str, wait_s: float = 0.0) -> list[str]:
        """Last lines of the latest process of that name. Waits for its end, for wait_s at most."""
        output = self._outputs.get(name)
        if output is None:
            return []
        output.ended.wait(wait_s)
        return list(output.tail)

    def close(self, wait_s: float = 1.0) -> None:
        """Write what is left, for wait_s at most: a child of a process may keep its pipe open."""
        if not self._thread.is_alive():
            return
        for output in list(self._outputs.values()):
            output.ended.wait(wait_s)
        os.write(self._wake_write, b"x")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._wake_write)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if b"x" in os.read(self._wake_read, _READ_BYTES):
                        return
                elif data := os.read(key.fd, _READ_BYTES):
                    key.data.take(data)
                else:
                    with self._lock:
                        self._selector.unregister(key.fd)
                    os.close(key.fd)
                    key.data.end()
