"""A scheduler's progress, in memory that it shares with the stage that supervises it.

The scheduler counts the rounds it completed, and the iterations of its loop that had nothing to
run; the stage polls the count (stages/progress_watch.py). Messages would not distinguish a
scheduler that hangs in a round from one that is idle: neither sends any.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_live.bridge.scheduler.part import Part

if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler

PROGRESS_ENV = "SGLANG_LIVE_PROGRESS"
_CELL = struct.Struct("<QQ")


class ProgressCell:
    """The shared counters. Owner of the file: the stage. Writer: rank 0 of its scheduler.

    n_steps: completed rounds and idle iterations.
    round_tokens: summed length of the prompts in the latest prefill round; 0 for a decode round.
    """

    def __init__(self, path: Path):
        """Raises OSError if the file cannot be created or allocated."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
        try:
            # Allocate the page now: if memory ran out later, writing would end in a SIGBUS.
            os.posix_fallocate(handle, 0, mmap.PAGESIZE)
            self._memory = mmap.mmap(handle, mmap.PAGESIZE)
        finally:
            os.close(handle)

    def step(self) -> None:
        n_steps, round_tokens = _CELL.unpack_from(self._memory)
        _CELL.pack_into(self._memory, 0, n_steps + 1, round_tokens)

    def launch(self, round_tokens: int) -> None:
        n_steps, _ = _CELL.unpack_from(self._memory)
        _CELL.pack_into(self._memory, 0, n_steps, round_tokens)

    def read(self) -> tuple[int, int]:
        """Returns (n_steps, round_tokens)."""
        n_steps, round_tokens = _CELL.unpack_from(self._memory)
        return n_steps, round_tokens


class Watch(Part):
    """Writes the counters. Rank 0 alone has this part."""

    def __init__(self, scheduler: "LiveScheduler", cell: ProgressCell):
        super().__init__(scheduler)
        self._cell = cell

    def before_launch(self, batch: ScheduleBatch) -> None:
        is_prefill = batch.forward_mode.is_extend()
        prompts = (len(req.origin_input_ids) for req in batch.reqs) if is_prefill else ()
        self._cell.launch(sum(prompts))

    def after_result(self) -> None:
        self._cell.step()

    def idle(self, fully: bool) -> None:
        if fully or self._scheduler.pausing.requests:
            self._cell.step()  # an iteration that had nothing to run
