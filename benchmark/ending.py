"""Whatever ends a benchmark ends the servers and engines that it has started."""

import signal
import sys
import threading
from collections.abc import Sequence

# PR_SET_PDEATHSIG is 1. A parent that ended before it was set sends no signal.
_TIE = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def end_like_ctrl_c() -> None:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, so that context managers stop what they started.

    Without effect outside of the main thread, where Python receives signals.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)


def tied(command: Sequence[str], pid: int) -> list[str]:
    """The command as a child that gets SIGTERM when its parent ends, also when that is killed.

    pid: of the parent.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-c", _TIE, str(pid), *command]
