"""Messages as ZMQ multipart: one msgpack frame, then raw tensor frames.

On one host a large tensor goes through shared memory instead; its reader removes it. What is
never read goes with the job (TensorFrames.release, discard) or, when a process died, by the pid
in its name (sweep_shared_memory).
"""

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import zmq
from prometheus_client.core import CounterMetricFamily, Metric

from sglang_live.messages import AnyMessage, TensorRef, UserSegment

log = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
SHM_PREFIX = "sglang_live-"
# Below this a copy through the socket costs less than opening a file.
SHM_MIN_BYTES = 256 * 1024
HEARTBEAT_MS = 2000

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_count = itertools.count()


class Fallbacks:
    """Tensors of this process that shared memory had no room for; n: how many."""

    def __init__(self):
        self.n = 0

    def note(self, error: OSError) -> None:
        if not self.n:
            log.error("shared_memory_full folder=%s error=%s", SHM_DIR, error)
        self.n += 1

    def collect(self) -> Iterator[Metric]:
        """For a prometheus_client registry."""
        name, doc = "sglang_live_shared_memory_full", "Tensors that went by socket instead."
        yield CounterMetricFamily(name, doc, value=self.n)


fallbacks = Fallbacks()


class TensorFrames:
    """Raw frames that go with one message."""

    def __init__(self, same_host: bool):
        self.frames: list[memoryview] = []
        self._same_host = same_host and SHM_DIR.is_dir()
        self._shared: list[Path] = []

    def put(self, array: np.ndarray) -> TensorRef:
        array = np.ascontiguousarray(array)
        dtype, shape = array.dtype.str, list(array.shape)
        if self._same_host and array.nbytes >= SHM_MIN_BYTES:
            name = f"{SHM_PREFIX}{os.getpid()}-{next(_count)}"
            self._shared.append(SHM_DIR / name)
            try:
                _write(array, SHM_DIR / name)
                return TensorRef(dtype, shape, shm=name)
            except OSError as error:
                # No room: the socket carries it, more slowly.
                self._shared.pop().unlink(missing_ok=True)
                fallbacks.note(error)
        # As bytes by numpy: a memoryview refuses to cast an empty array.
        self.frames.append(memoryview(array.reshape(-1).view(np.uint8)))
        return TensorRef(dtype, shape, frame=len(self.frames) - 1)

    def release(self) -> None:
        """Remove what nobody took from shared memory."""
        for path in self._shared:
            path.unlink(missing_ok=True)


def _write(array: np.ndarray, path: Path) -> None:
    """Raises OSError: there is no room."""
    array.tofile(path)


def take(ref: TensorRef, frames: list[bytes]) -> np.ndarray:
    """The tensor a ref points to. A shared one can be taken once."""
    if ref.shm:
        path = _shared_path(ref)
        array = np.fromfile(path, dtype=ref.dtype)
        path.unlink()
    else:
        array = np.frombuffer(frames[ref.frame], dtype=ref.dtype)
    return array.reshape(ref.shape)


def discard(message: AnyMessage) -> None:
    """Free what a message that nobody will read holds in shared memory."""
    if isinstance(message, UserSegment) and message.states and message.states.shm:
        _shared_path(message.states).unlink(missing_ok=True)


def encode(message: AnyMessage, tensors: TensorFrames | None = None) -> list:
    return [_encoder.encode(message), *(tensors.frames if tensors else ())]


def decode(parts: list[bytes]) -> tuple[AnyMessage, list[bytes]]:
    return _decoder.decode(parts[0]), parts[1:]


def keep_alive(socket: zmq.Socket) -> None:
    """Notice a connection whose other end is gone without a word, and connect anew."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)


def sweep_shared_memory(pid: int) -> int:
    """Remove what a dead process left in shared memory; the number of files."""
    left = list(SHM_DIR.glob(f"{SHM_PREFIX}{pid}-*")) if SHM_DIR.is_dir() else []
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


def _shared_path(ref: TensorRef) -> Path:
    if not ref.shm.startswith(SHM_PREFIX) or "/" in ref.shm:
        raise ValueError(f"bad shared memory name {ref.shm!r}")
    return SHM_DIR / ref.shm
