"""A process of a host, and its end of the pipes to the actor that has started it.

It ends when its stdin ends, as it does with the actor however that dies. The kernel's death signal
would follow the thread that started the process, and Ray's workers have many that come and go.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")

# Before each line of a child's stdout that is for the actor.
MARK = "sglang_live-host "
# Of Ray: its variables configure every Ray process, and the GPUs are those of the actor.
_RAY, _GPUS = "RAY_", "CUDA_VISIBLE_DEVICES"


# --- in the actor ---


def environment_of(gpus: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """Of a child, in which nothing is of Ray but the GPUs that the actor was given.

    own: of the actor's process.
    """
    kept = {name: value for name, value in own.items() if not name.startswith(_RAY)}
    return kept | {_GPUS: ",".join(gpus)}


class Child:
    """
    Args:
        program: "stages" or "gateway", of hosted.py.
        order: what it is to do, for read_order.
    """

    def __init__(
        self,
        program: str,
        order: msgspec.Struct,
        environment: Mapping[str, str],
    ):
        command = [sys.executable, "-m", "sglang_live.cluster.hosted", program]
        pipe, same = subprocess.PIPE, subprocess.STDOUT
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=same, env=environment
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()

    def run(self, on_line: Callable[[str], None]) -> int:
        """Return its exit status when it has ended. on_line: called with what it prints."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            on_line(line.decode(errors="replace"))
        return self._process.wait()

    def end(self) -> None:
        """It drains, and ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()


# --- in the child ---

# Not sys.stdin: Python aborts at its end if a thread waits in a buffered reader.
_STDIN, _PIECE_BYTES = 0, 1 << 16


def read_order(kind: type[T]) -> T:
    """What the actor wants; from now on this process ends with it, by SIGTERM."""
    text = b""
    while not text.endswith(b"\n") and (more := os.read(_STDIN, _PIECE_BYTES)):
        text += more
    order = msgspec.json.decode(text, type=kind)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    return order


def _end_with_stdin() -> None:
    while os.read(_STDIN, _PIECE_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def report(news: msgspec.Struct) -> None:
    print(MARK + msgspec.json.encode(news).decode(), flush=True)
