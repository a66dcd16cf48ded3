"""Messages as ZMQ multipart: one msgpack frame, then raw tensor frames.

On one host a large tensor goes through shared memory instead; its reader removes it, and a
process that dies leaves files that carry its pid (see sweep_shared_memory).
"""

import itertools
import os
from pathlib import Path

import msgspec
import numpy as np

from sglang_live.messages import AnyMessage, TensorRef

SHM_DIR = Path("/dev/shm")
SHM_PREFIX = "sglang_live-"
# Below this a copy through the socket costs less than opening a file.
SHM_MIN_BYTES = 256 * 1024

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_count = itertools.count()


class TensorFrames:
    """Raw frames that go with one message."""

    def __init__(self, same_host: bool):
        self.frames: list[memoryview] = []
        self._same_host = same_host and SHM_DIR.is_dir()

    def put(self, array: np.ndarray) -> TensorRef:
        array = np.ascontiguousarray(array)
        dtype, shape = array.dtype.str, list(array.shape)
        if self._same_host and array.nbytes >= SHM_MIN_BYTES:
            name = f"{SHM_PREFIX}{os.getpid()}-{next(_count)}"
            array.tofile(SHM_DIR / name)
            return TensorRef(dtype, shape, shm=name)
        self.frames.append(memoryview(array).cast("B"))
        return TensorRef(dtype, shape, frame=len(self.frames) - 1)


def take(ref: TensorRef, frames: list[bytes]) -> np.ndarray:
    """The tensor a ref points to. A shared one can be taken once."""
    if ref.shm:
        if not ref.shm.startswith(SHM_PREFIX) or "/" in ref.shm:
            raise ValueError(f"bad shared memory name {ref.shm!r}")
        path = SHM_DIR / ref.shm
        array = np.fromfile(path, dtype=ref.dtype)
        path.unlink()
    else:
        array = np.frombuffer(frames[ref.frame], dtype=ref.dtype)
    return array.reshape(ref.shape)


def encode(message: AnyMessage, tensors: TensorFrames | None = None) -> list:
    return [_encoder.encode(message), *(tensors.frames if tensors else ())]


def decode(parts: list[bytes]) -> tuple[AnyMessage, list[bytes]]:
    return _decoder.decode(parts[0]), parts[1:]


def sweep_shared_memory(pid: int) -> int:
    """Remove what a dead process left in shared memory; the number of files."""
    left = list(SHM_DIR.glob(f"{SHM_PREFIX}{pid}-*")) if SHM_DIR.is_dir() else []
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)
