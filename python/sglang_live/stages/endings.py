"""The end of a stage process: with its parent, and why: from its exit status and last lines."""

import ctypes
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# Exit statuses of stage processes, in addition to aio.EXIT_BROKEN.
EXIT_ENGINE_DIED = 71  # a process of its engine has ended
EXIT_STUCK = 72  # its scheduler made no progress
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_VMSTAT = Path("/proc/vmstat")

# "pkg.module.SomeError: text", as the last line of a traceback, also behind a logger's prefix.
_ERROR_LINE = re.compile(
    r"(?:^|: )((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)?: .+)$"
)
_NAMED_ERROR = re.compile(r"(?:^|[\s:])(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception)\b")
# Lines that Python and SGLang print after the reason.
_NOISE = re.compile(
    r"^\s*[\^~\s]*$|^\s+|^Traceback |^During handling|^The above exception"
    r"|received sigquit|SIGQUIT received|kill_process_tree|usually means"
    r"|resource_tracker|UserWarning|FutureWarning|DeprecationWarning|warnings\.warn"
    r"|destroy_process_group|^Exception ignored in|^Fatal Python error: Segmentation"
    r"|Subprocess .* crashed|^Current thread|^Extension modules|\bINFO\b",
    re.IGNORECASE,
)


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process, and the program that it becomes, with its parent, even a killed one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def telling_line(lines: Sequence[str]) -> str:
    """The line that gives the reason. "": none does.

    The last error that has a name; otherwise the last line that is neither a traceback's frame nor
    printed whenever an engine ends.
    """
    candidates = [line.strip() for line in lines if line.strip() and not _NOISE.search(line)]
    named = [line for line in candidates if _NAMED_ERROR.search(line)]
    chosen = (named or candidates or [""])[-1]
    match = _ERROR_LINE.search(chosen)
    return match[1] if match else chosen


def cause_of(status: int | None, lines: Sequence[str], out_of_memory: bool) -> str:
    """Why a process ended unexpectedly. "": not known.

    Args:
        status: exit status; negative: the signal. None: it never started.
        lines: that it printed last.
        out_of_memory: see was_work.
    """
    said = telling_line(lines)
    if status == -signal.SIGKILL and out_of_memory and not _NAMED_ERROR.search(said):
        return "the kernel killed it: there is too little memory"
    if status == -signal.SIGBUS:
        return "SIGBUS: /dev/shm is full, or a file that was mapped became shorter"
    return said or (signal.strsignal(-status) or "" if status is not None and status < 0 else "")


def was_work(status: int, out_of_memory: bool) -> bool:
    """Whether one of the stage's jobs may have ended it.

    Args:
        out_of_memory: whether the kernel may have killed a process for lack of memory just then.
    """
    number = -status if status < 0 else status - 128  # a shell's encoding of a signal
    if status == 0 or number in _FROM_OUTSIDE:
        return False
    return number != signal.SIGKILL or out_of_memory


def oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory since it started. None: unknown."""
    try:
        for line in _VMSTAT.read_text("utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None
