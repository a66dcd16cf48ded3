"""Messages as ZMQ multipart: one msgpack frame, then raw tensor frames.

On one host a large tensor goes through shared memory instead; its reader removes the file. Files
that are never read are removed with the job (TensorFrames.release, discard) or, after the death of
a process or a server, by the run and the pid in their names (sweep_shared_memory).
"""

import logging
import math
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from prometheus_client.core import CounterMetricFamily, Metric

from sglang_live.messages import (
    AnyMessage,
    MakeVoice,
    TalkerRequest,
    TalkerSegments,
    TensorRef,
    ThinkerRequest,
    UserSegment,
    WireAudio,
    WireImage,
)

log = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
SHM_PREFIX = "sglang_live-"
# Run of tensors that belong to no server: those of tests and benchmarks.
NO_RUN = "none"
# Below this a copy through the socket costs less than opening a file.
SHM_MIN_BYTES = 256 * 1024
# Of a host, after which its connections are broken, or up to a heartbeat later. A server's turns go
# on elsewhere then, and are to be heard again within 2.5 s; a stage that broke with a server which
# stood still for a moment would end all of them.
STAGE_SILENT_MS, SERVER_SILENT_MS = 1600, 6000
_HEARTBEATS = 4  # in that time
# A connection that has not proved its key by then is closed; before that it can fill one frame.
HANDSHAKE_MS = 10_000
# From a peer on another host: more than a conversation's hidden states.
MAX_FRAME_BYTES = 256 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
# Of samples, codec frames and hidden states. Never objects, which numpy would unpickle.
_DTYPES = frozenset(
    ("<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "|u1", "|i1", "|b1", "<u2", "<u4", "<u8")
)


class MalformedError(ValueError):
    """What a peer sent is no message of this protocol."""


class Fallbacks:
    """Counts tensors of this process for which shared memory had no room.

    n: how many.
    """

    def __init__(self) -> None:
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


def shm_names(run: str, pid: int | None = None) -> str:
    """Prefix of the names of files in shared memory of a run, or of one of its processes.

    Args:
        run: of a server (run_dir.run_of). No two servers have the same one at a time; their
            processes may have the same pids, in containers that share the memory.
    """
    return f"{SHM_PREFIX}{run}-" if pid is None else f"{SHM_PREFIX}{run}-{pid}-"


class TensorFrames:
    """The tensors of one message: raw frames, and files in shared memory.

    Args:
        same_host: whether the receiver shares this machine's memory.
        run: of the server, for the names of files in shared memory.
    """

    def __init__(self, same_host: bool, run: str = NO_RUN):
        self._names = shm_names(run, os.getpid())
        self.frames: list[memoryview] = []
        self._same_host = same_host and SHM_DIR.is_dir()
        self._shared: list[Path] = []

    def put(self, array: np.ndarray) -> TensorRef:
        array = np.ascontiguousarray(array)
        dtype, shape = array.dtype.str, list(array.shape)
        if self._same_host and array.nbytes >= SHM_MIN_BYTES:
            # Random: another user could create a file with a predictable name first.
            name = f"{self._names}{secrets.token_hex(16)}"
            self._shared.append(SHM_DIR / name)
            try:
                _write(array, SHM_DIR / name)
                return TensorRef(dtype, shape, shm=name)
            except OSError as error:
                # There is no room: the socket carries it, more slowly.
                path = self._shared.pop()
                if not isinstance(error, FileExistsError):  # then it is another process's
                    path.unlink(missing_ok=True)
                fallbacks.note(error)
        # As bytes by numpy: a memoryview refuses to cast an empty array.
        self.frames.append(array.reshape(-1).view(np.uint8).data)
        return TensorRef(dtype, shape, frame=len(self.frames) - 1)

    def release(self) -> None:
        """Remove the files in shared memory that were not read."""
        for path in self._shared:
            path.unlink(missing_ok=True)


def _write(array: np.ndarray, path: Path) -> None:
    """Raises OSError if there is no room, or the file exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        left = array.reshape(-1).view(np.uint8).data
        while len(left):
            left = left[file.write(left) :]


def take(ref: TensorRef, frames: list[bytes]) -> np.ndarray:
    """The tensor that a ref points to. One in shared memory can be taken once.

    Raises:
        MalformedError: no such tensor came with the message.
        FileNotFoundError: the tensor was taken already, or its sender has removed it.
    """
    if ref.dtype not in _DTYPES or any(n < 0 for n in ref.shape):
        raise MalformedError(f"bad tensor {ref.dtype[:16]!r} {ref.shape[:8]}")
    data: bytes | memoryview
    if ref.shm:
        data = _take_shared(_shared_path(ref))
    elif 0 <= ref.frame < len(frames):
        data = frames[ref.frame]
    else:
        raise MalformedError(f"no frame {ref.frame} among {len(frames)}")
    n_bytes = math.prod(ref.shape) * np.dtype(ref.dtype).itemsize
    if n_bytes != len(data):
        raise MalformedError(f"{len(data)} bytes for a tensor of {n_bytes}")
    return np.frombuffer(data, dtype=ref.dtype).reshape(ref.shape)


def _take_shared(path: Path) -> bytes:
    # A link, or a file that another user made, may be anything.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise MalformedError(f"{path.name} is not a file of this user")
        path.unlink()
        return file.read()


def discard(message: AnyMessage) -> None:
    """Remove the files in shared memory of a message that is not read."""
    for ref in _refs(message):
        if ref.shm:
            _shared_path(ref).unlink(missing_ok=True)


def encode(message: AnyMessage, tensors: TensorFrames | None = None) -> list[bytes | memoryview]:
    return [_encoder.encode(message), *(tensors.frames if tensors else ())]


def decode(
    parts: list[bytes], same_host: bool = True, run: str = ""
) -> tuple[AnyMessage, list[bytes]]:
    """
    Args:
        same_host: whether the message may refer to this machine's shared memory.
        run: of the server to whose files it may refer. "": of any server.
    Raises:
        MalformedError: the parts are no message, or refer to other memory.
    """
    try:
        message = _decoder.decode(parts[0])
    except (msgspec.MsgspecError, UnicodeError, RecursionError, IndexError) as error:
        raise MalformedError(str(error) or type(error).__name__) from error
    if not same_host and any(ref.shm for ref in _refs(message)):
        raise MalformedError("a peer on another host refers to shared memory")
    if run and any(r.shm and not r.shm.startswith(shm_names(run)) for r in _refs(message)):
        raise MalformedError("a peer refers to shared memory of another server")
    return message, parts[1:]


def _refs(message: AnyMessage) -> Iterator[TensorRef]:
    """All tensors of a message."""
    if isinstance(message, UserSegment) and message.segment.states is not None:
        yield message.segment.states
    elif isinstance(message, ThinkerRequest):
        parts = (part for item in message.items for part in item.parts)
        for part in parts:
            if isinstance(part, WireAudio):
                yield part.pcm
            elif isinstance(part, WireImage):
                yield part.png
    elif isinstance(message, TalkerRequest | TalkerSegments):
        yield from (s.states for s in message.segments if s.states is not None)
    elif isinstance(message, MakeVoice):
        yield message.samples


def harden(socket: zmq.Socket[Any], silent_ms: int) -> None:
    """For peers on other hosts: reach them, bound their frames, detect broken connections."""
    socket.setsockopt(zmq.IPV6, 1)  # beside IPv4
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # applies before the handshake, too
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, silent_ms // _HEARTBEATS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent_ms)


def sweep_shared_memory(run: str, pid: int | None = None) -> int:
    """Remove the files of a dead process, or of a dead server's run. Returns their number."""
    n_removed, names = 0, shm_names(run, pid)
    for path in list(SHM_DIR.iterdir()) if SHM_DIR.is_dir() else ():
        if not path.name.startswith(names):
            continue
        try:
            if path.lstat().st_uid != os.geteuid():
                log.warning("foreign_file path=%s", path)
                continue
            path.unlink()
            n_removed += 1
        except FileNotFoundError:
            pass
        except OSError as error:
            # A directory, or a file that may not be removed: no tensor.
            log.warning("leftover_not_removed path=%s error=%s", path, error)
    return n_removed


def _shared_path(ref: TensorRef) -> Path:
    if not ref.shm.startswith(SHM_PREFIX) or "/" in ref.shm:
        raise MalformedError(f"bad shared memory name {ref.shm[:80]!r}")
    return SHM_DIR / ref.shm
