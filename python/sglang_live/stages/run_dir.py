"""A server's folder for sockets and temporary files, and the removal of killed servers' folders.

The server holds a lock on a file in it, which the kernel releases when the process ends, in any way
and in any container. A folder whose lock is free therefore belongs to no server, and is removed
with all files that its processes have in shared memory.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sglang_live.stages.transport.wire import sweep_shared_memory

log = logging.getLogger(__name__)

PREFIX = "sgl-live-"
# Locked by the server.
_OWNER = "owner"


@dataclass(slots=True)
class RunDir:
    """path: short, because a Unix socket's path may have 107 characters at most."""

    path: Path
    _lock: int

    @staticmethod
    def make(*, survives_exec: bool = False) -> "RunDir":
        """
        Args:
            survives_exec: the program that this process is about to become owns it.
        Raises:
            OSError: there is no room for it.
        """
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        (path / "tmp").mkdir(mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        lock = os.open(path / "new", flags, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Renamed only when locked, so that no other server removes this folder as a dead one's.
        (path / "new").rename(path / _OWNER)
        os.set_inheritable(lock, survives_exec)
        return RunDir(path, lock)

    def remove(self) -> None:
        """After the last process of the run has ended."""
        sweep_shared_memory(run_of(self.path))
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def run_of(folder: Path) -> str:
    """The run's name, which is also in the names of its files in shared memory."""
    return folder.name.removeprefix(PREFIX)


def clear_dead() -> int:
    """Remove what killed servers of this user have left. Returns the number of their folders."""
    try:
        parent = tempfile.gettempdir()
    except FileNotFoundError:  # such as a full one: preflight.py tells what it is after this
        parent = os.environ.get("TMPDIR") or "/tmp"
    folders = list(Path(parent).glob(f"{PREFIX}*"))
    n_cleared = sum(_clear(folder) for folder in folders)
    if n_cleared:
        log.info("leftovers_cleared folders=%d", n_cleared)
    return n_cleared


def _clear(folder: Path) -> bool:
    try:
        # Neither another user's folder nor a link is removed.
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        lock = os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # without an owner file it may just be created
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its stages end with it (runtime.die_with_parent): no process uses these files.
        sweep_shared_memory(run_of(folder))
        shutil.rmtree(folder)
    except OSError as error:
        if not isinstance(error, BlockingIOError):
            log.warning("leftover_not_cleared folder=%s error=%s", folder, error)
        return False
    finally:
        os.close(lock)
    return True
