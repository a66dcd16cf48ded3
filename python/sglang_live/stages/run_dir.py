"""A server's folder for sockets and temporary files, and what servers left that were killed.

The owner holds a lock on a file in it. The kernel lifts that when the process ends, however it
ends and in whatever container: so a folder whose lock is free belongs to no server any more, and
goes with all that its processes had in shared memory.
"""

import fcntl
import logging
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_live.stages.connectors.wire import sweep_shared_memory

log = logging.getLogger(__name__)

PREFIX = "sgl-live-"
# Pids of the server and of all its stages, one a line; locked by the server.
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
        # Under its name it is locked already: no other start takes this folder for a dead one's.
        (path / "new").rename(path / _OWNER)
        os.set_inheritable(lock, survives_exec)
        note_process(path, os.getpid())
        return RunDir(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def note_process(run_dir: Path, pid: int) -> None:
    """What it leaves in shared memory is cleared by the next start if we are killed."""
    try:
        # Without O_CREAT: an owner file without its lock would hand the folder to the next start.
        with os.fdopen(os.open(run_dir / _OWNER, os.O_WRONLY | os.O_APPEND), "w") as owner:
            owner.write(f"{pid}\n")
    except OSError as error:
        log.warning("process_not_noted pid=%d error=%s", pid, error)


def clear_dead() -> int:
    """Remove what killed servers of this user left; the number of their folders."""
    folders = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    n_cleared = sum(_clear(folder) for folder in folders)
    if n_cleared:
        log.info("leftovers_cleared folders=%d", n_cleared)
    return n_cleared


def _clear(folder: Path) -> bool:
    try:
        # Another user's is none of our business, and neither is a link to somewhere else.
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        lock = os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # without an owner it may just be in the making
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pids = (folder / _OWNER).read_text().split()
        for pid in pids:
            if pid.isdecimal():
                sweep_shared_memory(int(pid), before_s=_began_s(int(pid)))
        shutil.rmtree(folder)
    except OSError as error:
        if not isinstance(error, BlockingIOError):
            log.warning("leftover_not_cleared folder=%s error=%s", folder, error)
        return False
    finally:
        os.close(lock)
    return True


def _began_s(pid: int) -> float:
    """When the process began, in seconds since 1970; infinite: it has ended.

    A pid is given to another process in time: what is older than that is not its own.
    """
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return math.inf
