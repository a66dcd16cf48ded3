"""Sound of media files that libsndfile does not read: mp4, m4a, 3gp, webm, mkv, aac, amr, wma.

In: bytes, as they were uploaded. Out: samples, or BadInputError. FFmpeg decodes, through PyAV, in a
forked process for each file (media_host.py): a fault of a demuxer ends that process alone. PyAV is
an extra, because its wheel contains code under the GPL (NOTICE).
"""

import array
import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError, LiveError

DECODED, REFUSED, ENDED = b"A", b"E", b"D"
# Of one file's process: enough for the largest body at a tenth of a core.
CPU_S, WALL_S, MEMORY_BYTES = 10, 20, 256 << 20
_HEADER_BYTES = 5
_AT_ONCE = threading.BoundedSemaphore(4)
_NAMES = {"mov": "mp4", "matroska": "webm", "asf": "wma"}


def container_of(data: bytes) -> str | None:
    """FFmpeg's name of the container, from its first bytes alone; None: none of these.

    FFmpeg itself never probes: playlists and descriptions of streams open files and addresses.
    """
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"moof", b"styp", b"wide", b"skip"):
        return "mov"
    if data.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if data.startswith((b"#!AMR\n", b"#!AMR-WB\n")):
        return "amr"
    if data.startswith(bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")):
        return "asf"
    # ADTS has the sync word of MPEG audio, and layer 0.
    is_adts = len(data) > 1 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0
    return "aac" if is_adts else None


def decode(data: bytes, container: str, *, rate_hz: int, max_s: float) -> npt.NDArray[np.int16]:
    """Decode the first audio stream of a file.

    Blocks; several threads may call it.

    Args:
        container: of container_of().
    Returns:
        [n] int16 at rate_hz, its channels mixed.
    Raises:
        BadInputError: the file is damaged, has no sound, is longer than max_s, or takes more time
            or memory than a file may; or this server has no PyAV.
        LiveError: the decoder cannot be started.
    """
    if importlib.util.find_spec("av") is None:
        raise BadInputError(
            f"{_NAMES.get(container, container)} is not read by this server: it lacks the extra "
            "sglang-live[media]"
        )
    with _AT_ONCE:
        results, end = os.pipe()
        try:
            try:
                _host().send(data, end, container, rate_hz, max_s)
            finally:
                os.close(end)
            return _collected(results, container)
        finally:
            os.close(results)


def _collected(results: int, container: str) -> npt.NDArray[np.int16]:
    blocks: list[bytes] = []
    for kind, payload in _messages(results):
        if kind == DECODED:
            blocks.append(payload)
        elif kind == REFUSED:
            raise BadInputError(payload.decode())
        elif not any(blocks):
            raise BadInputError("The audio file holds no samples.")
        else:
            return np.frombuffer(b"".join(blocks), "<i2").astype(np.int16, copy=False)
    name = _NAMES.get(container, container)
    raise BadInputError(f"This {name} file takes more time or memory to decode than a file may.")


def _messages(results: int) -> Iterator[tuple[bytes, bytes]]:
    """Until the process ends; longer than it can take none is waited for."""
    until_s = time.monotonic() + WALL_S + 5
    received = bytearray()
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([results], [], [], left_s)[0]:
            return
        some = os.read(results, 1 << 20)
        if not some:
            return
        received += some
        while len(received) >= _HEADER_BYTES:
            size = int.from_bytes(received[1:_HEADER_BYTES], "little")
            if len(received) < _HEADER_BYTES + size:
                break
            yield bytes(received[:1]), bytes(received[_HEADER_BYTES : _HEADER_BYTES + size])
            del received[: _HEADER_BYTES + size]


class _Host:
    """The process that has imported PyAV, and forks one for each file."""

    def __init__(self) -> None:
        self._requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "sglang_live.sound.media_host", str(other.fileno())],
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            except OSError as error:
                self._requests.close()
                raise LiveError(f"the decoder of media files cannot be started: {error}") from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """It ends when nothing more can be asked of it."""
        self._requests.close()
        self._process.wait()

    def send(self, data: bytes, results: int, container: str, rate_hz: int, max_s: float) -> None:
        file = os.memfd_create("media")
        try:
            with os.fdopen(os.dup(file), "wb") as out:
                out.write(data)
            os.lseek(file, 0, os.SEEK_SET)
            asked = json.dumps({"container": container, "rate_hz": rate_hz, "max_s": max_s})
            passed = array.array("i", [file, results])
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)
            self._requests.sendmsg([asked.encode()], [rights])
        finally:
            os.close(file)


_lock = threading.Lock()
_running: list[_Host] = []


def _host() -> _Host:
    """One for this process; another one if it has died."""
    with _lock:
        while _running and not _running[-1].is_alive:
            _running.pop().close()
        if not _running:
            _running.append(_Host())
        return _running[-1]


def close() -> None:
    """End the process, if there is one."""
    with _lock:
        while _running:
            _running.pop().close()
