"""Progress of a batch on a terminal: one line that is rewritten, or a new line for each change."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

_BAR_CHARS = 24
_PAUSES = {
    "storage_full": "the server's disk is full",
    "key_storage_full": "this key's files are too large: delete some",
}


class Progress:
    def __init__(self, out: TextIO = sys.stderr, now_s: Callable[[], float] = time.monotonic):
        self._out, self._now_s = out, now_s
        self._rewrites = out.isatty()
        self._begun_s: float | None = None  # of the first look at running requests
        self._n_at_begin, self._latest, self._width = 0, "", 0

    def show(self, batch: dict[str, Any]) -> None:
        """batch: as the server describes it."""
        self._write(self._line(batch))

    def offline(self, reason: str) -> None:
        self._write(f"waiting for the server ({reason})")

    def end(self) -> None:
        if self._rewrites and self._latest:
            self._out.write("\n")
        self._latest = ""

    def _line(self, batch: dict[str, Any]) -> str:
        counts = batch["request_counts"]
        n_done, total = counts["completed"] + counts["failed"], counts["total"]
        line = f"{batch['status']:<11}"
        if total:
            n_full = _BAR_CHARS * n_done // total
            line += f" [{'#' * n_full}{'.' * (_BAR_CHARS - n_full)}] {n_done}/{total}"
        if counts["failed"]:
            line += f", {counts['failed']} failed"
        if pause := _PAUSES.get(batch.get("paused") or ""):
            return f"{line}, paused: {pause}"
        return line + self._left(n_done, total) if batch["status"] == "in_progress" else line

    def _left(self, n_done: int, total: int) -> str:
        now_s = self._now_s()
        if self._begun_s is None:
            self._begun_s, self._n_at_begin = now_s, n_done
        n_seen, took_s = n_done - self._n_at_begin, now_s - self._begun_s
        if n_seen < 1 or took_s <= 0:
            return ""
        left_s = round((total - n_done) * took_s / n_seen)
        return f", {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"

    def _write(self, line: str) -> None:
        if line == self._latest:
            return
        if self._rewrites:
            self._out.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._out.write(line + "\n")
        self._out.flush()
        self._latest = line
