"""Log output that never stops the service: lines that cannot be written are dropped and counted.

If a disk is full, a file was removed, or the reader of a pipe has ended or is blocked, a write
fails or blocks without limit, in the middle of the code that logs.
"""

import io
import os
import select
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric

# A pipe that is ready takes this many bytes without blocking (PIPE_BUF of Linux).
_PIECE_BYTES = 4096


class LogDrops:
    """Counts dropped lines by log; a collector for a prometheus_client registry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: Counter[str] = Counter()

    def count(self, log: str, n_lines: int) -> None:
        with self._lock:
            self._lines[log] += n_lines

    def of(self, log: str) -> int:
        return self._lines[log]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "sglang_live_log_lines_dropped", "Log lines that could not be written.", labels=["log"]
        )
        with self._lock:
            for log, n_lines in self._lines.items():
                family.add_metric([log], n_lines)
        yield family


class LogWriter:
    """Writes to a file descriptor; never raises, and never waits longer than wait_s.

    Args:
        name: name of the log in the counts.
        wait_s: longest wait for a slow reader of a pipe or terminal.

    Attributes:
        missing: lines dropped since the last successful write; the next write reports them.
        error: reason, as text; "" if no line is missing.
    """

    def __init__(self, name: str, drops: LogDrops, *, wait_s: float = 0.0):
        self._name = name
        self._drops = drops
        self._wait_s = wait_s
        self.missing = 0
        self.error = ""

    def write(self, fd: int, data: bytes) -> bool:
        """Returns False if a part of the data was dropped."""
        if self.missing:
            note = f"({self.missing} lines were dropped here: {self.error})\n"
            if self._put(fd, note.encode()) is not None:
                return self._drop(data)
            self.missing = 0
            self.error = ""
        left = self._put(fd, data)
        return left is None or self._drop(left)

    def failed(self, data: bytes, error: OSError) -> bool:
        """Count data for which no file could be opened. Returns False."""
        self.error = error.strerror or str(error)
        return self._drop(data)

    def _put(self, fd: int, data: bytes) -> bytes | None:
        """Returns the data that was not written, or None."""
        while data:
            try:
                if not _has_room(fd, self._wait_s):
                    self.error = "its reader does not read"
                    return data
                data = data[os.write(fd, data[:_PIECE_BYTES]) :]
            except OSError as error:
                self.error = error.strerror or str(error)
                return data
        return None

    def _drop(self, data: bytes) -> bool:
        n_lines = max(1, data.count(b"\n"))
        self.missing += n_lines
        self._drops.count(self._name, n_lines)
        return False


def _has_room(fd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    # A pipe without a reader counts as ready; the write then fails.
    return bool(poll.poll(1000 * wait_s))


class _UnfailingStream(io.RawIOBase):
    """An output stream of this process whose writes never fail."""

    def __init__(self, fd: int, writer: LogWriter):
        self._fd = fd
        self._writer = writer

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        written = bytes(data)
        self._writer.write(self._fd, written)
        return len(written)


def protect_own_output(drops: LogDrops) -> None:
    """Make print, logging and tracebacks of this process independent of faults of their output.

    Streams that a test has replaced stay unchanged.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _UnfailingStream(stream.fileno(), LogWriter("server", drops))
            text = io.TextIOWrapper(
                io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True
            )
            setattr(sys, name, text)
