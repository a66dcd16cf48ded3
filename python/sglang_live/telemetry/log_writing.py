"""Logs that never stop the service: what cannot be written is dropped, counted and said once.

A disk is full, a file was removed, the reader of a pipe is gone or does not read: a write then
fails or waits for ever, in the middle of whatever wanted to say something.
"""

import io
import os
import select
import sys
import threading
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

# A pipe that reports room takes this much without waiting (PIPE_BUF of Linux).
_PIECE_BYTES = 4096


class LogDrops:
    """Lines that could not be written, by log; registered with a prometheus_client registry."""

    def __init__(self):
        self._lock = threading.Lock()
        self._lines: Counter[str] = Counter()

    def count(self, log: str, n_lines: int) -> None:
        with self._lock:
            self._lines[log] += n_lines

    def of(self, log: str) -> int:
        return self._lines[log]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "sglang_live_log_lines_dropped", "Lines that no log had room for.", labels=["log"]
        )
        with self._lock:
            for log, n_lines in self._lines.items():
                family.add_metric([log], n_lines)
        yield family


class LogWriter:
    """Writes to a descriptor and never raises, never waits longer than wait_s.

    Args:
        name: of the log, for the count.
        wait_s: for a pipe or a terminal whose reader is slow.

    Attributes:
        missing: lines dropped since the last successful write; said before the next one.
        error: why, as text; "" while nothing is missing.
    """

    def __init__(self, name: str, drops: LogDrops, *, wait_s: float = 0.0):
        self._name, self._drops, self._wait_s = name, drops, wait_s
        self.missing, self.error = 0, ""

    def write(self, fd: int, data: bytes) -> bool:
        """Returns False if some of it was dropped."""
        if self.missing:
            note = f"({self.missing} lines were dropped here: {self.error})\n"
            if self._put(fd, note.encode()) is not None:
                return self._drop(data)
            self.missing, self.error = 0, ""
        left = self._put(fd, data)
        return left is None or self._drop(left)

    def failed(self, data: bytes, error: OSError) -> bool:
        """There is nothing to write to. Returns False."""
        self.error = error.strerror or str(error)
        return self._drop(data)

    def _put(self, fd: int, data: bytes) -> bytes | None:
        """What was not written; None: all was."""
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
    # A reader that is gone is "ready" as well: the write then says so.
    return bool(poll.poll(1000 * wait_s))


class _Unfailing(io.RawIOBase):
    def __init__(self, fd: int, writer: LogWriter):
        self._fd, self._writer = fd, writer

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data) -> int:
        self._writer.write(self._fd, bytes(data))
        return len(data)


def protect_own_output(drops: LogDrops) -> None:
    """Make print, logging and tracebacks of this process survive what they are written to.

    Streams that a test put in place are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Unfailing(stream.fileno(), LogWriter("server", drops))
            text = io.TextIOWrapper(
                io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True
            )
            setattr(sys, name, text)
