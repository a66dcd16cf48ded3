"""Log of the times in which a stage's model computes, to find other causes of delay in a turn.

Off unless SGLANG_LIVE_FORWARD_LOG names a directory. Times are CLOCK_MONOTONIC, which all processes
of a machine share.
"""

import atexit
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

FORWARD_LOG_ENV = "SGLANG_LIVE_FORWARD_LOG"


class ForwardLog:
    """Writes `begin end` lines, in seconds, to a file of this process."""

    def __init__(self, directory: Path, stage: str):
        self._file = (directory / f"{stage}-{os.getpid()}.log").open(
            "w", buffering=1, encoding="utf-8"
        )
        self._failed = False
        atexit.register(self._close)

    def _close(self) -> None:
        with suppress(OSError):
            self._file.close()

    @staticmethod
    def from_env(stage: str) -> "ForwardLog | None":
        directory = os.environ.get(FORWARD_LOG_ENV)
        return ForwardLog(Path(directory), stage) if directory else None

    @contextmanager
    def span(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._write(f"{begin:.6f} {time.monotonic():.6f}\n")

    def _write(self, line: str) -> None:
        if self._failed:
            return
        try:
            self._file.write(line)
        except OSError as error:
            # A full disk must not end the engine. The spans written so far stay useful.
            self._failed = True
            log.error("forward_log_ends file=%s error=%s", self._file.name, error.strerror)


def read_spans(directory: Path) -> list[tuple[float, float]]:
    """The spans of all stages, ordered by their begin."""
    lines = [
        line for path in directory.glob("*.log") for line in path.read_text("utf-8").splitlines()
    ]
    spans = (line.split() for line in lines)
    return sorted((float(begin), float(end)) for begin, end in spans)


def covered_s(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds of [begin, end] in which at least one span runs."""
    covered, at = 0.0, begin
    for first, last in spans:
        first, last = max(first, at), min(last, end)
        if last > first:
            covered += last - first
            at = last
    return covered
