"""How far a scheduler has come, for the stage that watches over it: a few bytes they share.

The scheduler counts rounds it completed, and turns of its loop in which it rightly ran none; the
stage looks now and then (stages/progress_watch.py). A message would not do: what is stopped in the
middle of a round sends none, and neither does one that is idle.
"""

import mmap
import os
import struct
from pathlib import Path

PROGRESS_ENV = "SGLANG_LIVE_PROGRESS"
_CELL = struct.Struct("<QQ")


class ProgressCell:
    """Owner of the file: the stage. Writer: rank 0 of its scheduler.

    Attributes:
        n_steps: rounds and idle turns so far.
        round_tokens: length of all prompts in the round that was launched last; 0: none is new.
    """

    def __init__(self, path: Path):
        """Raises OSError: the folder has no room for it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
        try:
            # Room is taken now: a page that cannot be had later would be a SIGBUS.
            os.posix_fallocate(handle, 0, mmap.PAGESIZE)
            self._memory = mmap.mmap(handle, mmap.PAGESIZE)
        finally:
            os.close(handle)

    @staticmethod
    def from_env() -> "ProgressCell | None":
        path = os.environ.get(PROGRESS_ENV)
        return ProgressCell(Path(path)) if path else None

    def step(self) -> None:
        n_steps, round_tokens = _CELL.unpack_from(self._memory)
        _CELL.pack_into(self._memory, 0, n_steps + 1, round_tokens)

    def launch(self, round_tokens: int) -> None:
        n_steps, _ = _CELL.unpack_from(self._memory)
        _CELL.pack_into(self._memory, 0, n_steps, round_tokens)

    def read(self) -> tuple[int, int]:
        """n_steps, round_tokens."""
        return _CELL.unpack_from(self._memory)
