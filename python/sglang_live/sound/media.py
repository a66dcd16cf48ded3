"""Media files that libsndfile neither reads nor writes: mp4, m4a, 3gp, webm, mkv, aac, amr, wma.

In: bytes, as they were uploaded. Out: samples, or BadInputError; of aac also the way back.
FFmpeg works, through PyAV, in a forked process for each file (media_host.py): a fault of a demuxer
ends that process alone. PyAV is an extra, because its wheel contains code under the GPL (NOTICE).
Videos (videos.py), and pictures (pictures.py), which need no PyAV, are decoded so, too.
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
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_live.errors import BadInputError, LiveError

DECODED, REFUSED, ENDED = b"A", b"E", b"D"
# Of what is seen, the longer side to the shorter: the models' processors refuse 200, also after
# rounding.
MAX_RATIO = 100
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
    check_installed(_NAMES.get(container, container))
    asked = {"container": container, "rate_hz": rate_hz, "max_s": max_s}
    blocks = decoded(data, asked, f"{_NAMES.get(container, container)} file")
    if not any(blocks):
        raise BadInputError("The audio file holds no samples.")
    return np.frombuffer(b"".join(blocks), "<i2").astype(np.int16, copy=False)


def decoded(data: bytes, asked: dict[str, Any], what: str) -> list[bytes]:
    """What a forked process makes of a file. Blocks; several threads may call it.

    Args:
        what: the file is, for errors.
    Raises: as decode().
    """
    with _AT_ONCE:
        results, end = os.pipe()
        file = os.memfd_create("media")
        try:
            with os.fdopen(os.dup(file), "wb") as out:
                out.write(data)
            os.lseek(file, 0, os.SEEK_SET)
            _host().send(asked, file, end)
        except BaseException:
            os.close(results)
            raise
        finally:
            os.close(file)
            os.close(end)
        try:
            return _collected(results, what)
        finally:
            os.close(results)


def is_installed() -> bool:
    """Whether this server has PyAV."""
    return importlib.util.find_spec("av") is not None


def check_installed(what: str) -> None:
    """Raises BadInputError: it is not, so that this is not read."""
    if not is_installed():
        raise BadInputError(
            f"{what} is not read by this server: it lacks the extra sglang-live[media]"
        )


class AacEncoder:
    """An .aac file (ADTS) that is sent while it grows. push() and finish() block.

    Raises:
        LiveError: the process cannot be started, or has ended.
    """

    _PIECE_BYTES = 1 << 16
    _PATIENCE_S = 30.0

    def __init__(self, rate_hz: int):
        self._peer, other = socket.socketpair()
        self._unread = _Messages()
        self._peer.settimeout(self._PATIENCE_S)
        with other:
            try:
                _host().send({"encode": "adts", "rate_hz": rate_hz}, other.fileno(), other.fileno())
            except BaseException:
                self._peer.close()
                raise

    def push(self, pcm: bytes) -> bytes:
        """pcm: int16, whole samples. Returns what is there of the file."""
        found = b""
        for begin in range(0, len(pcm), self._PIECE_BYTES):
            try:
                self._peer.sendall(pcm[begin : begin + self._PIECE_BYTES])
            except OSError as error:
                raise _encoder_ended() from error
            # Its answers must not fill the socket.
            while select.select([self._peer], [], [], 0)[0]:
                found += self._read()
        return found

    def finish(self) -> bytes:
        self._peer.shutdown(socket.SHUT_WR)
        found = b""
        while not self._unread.ended:
            found += self._read()
        return found

    def close(self) -> None:
        """The process ends."""
        self._peer.close()

    def _read(self) -> bytes:
        try:
            some = self._peer.recv(self._PIECE_BYTES)
        except OSError as error:
            raise _encoder_ended() from error
        if not some:
            raise _encoder_ended()
        return b"".join(payload for _, payload in self._unread.push(some))


def _encoder_ended() -> LiveError:
    return LiveError("The encoder of aac has ended.")


def _collected(results: int, what: str) -> list[bytes]:
    blocks: list[bytes] = []
    for kind, payload in _messages(results):
        if kind == DECODED:
            blocks.append(payload)
        elif kind == REFUSED:
            raise BadInputError(payload.decode())
        else:
            return blocks
    raise BadInputError(f"This {what} takes more time or memory to decode than a file may.")


def _messages(results: int) -> Iterator[tuple[bytes, bytes]]:
    """Until the process ends; longer than it can take none is waited for."""
    until_s = time.monotonic() + WALL_S + 5
    messages = _Messages()
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([results], [], [], left_s)[0]:
            return
        some = os.read(results, 1 << 20)
        if not some:
            return
        yield from messages.push(some)


class _Messages:
    """Messages of a process (media_host.say). ended: it has said that there are no more."""

    def __init__(self) -> None:
        self._received = bytearray()
        self.ended = False

    def push(self, some: bytes) -> Iterator[tuple[bytes, bytes]]:
        received = self._received
        received += some
        while len(received) >= _HEADER_BYTES:
            size = int.from_bytes(received[1:_HEADER_BYTES], "little")
            if len(received) < _HEADER_BYTES + size:
                break
            kind = bytes(received[:1])
            self.ended = self.ended or kind == ENDED
            yield kind, bytes(received[_HEADER_BYTES : _HEADER_BYTES + size])
            del received[: _HEADER_BYTES + size]


class _Host:
    """The process that has imported the decoders, and forks one for each file."""

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

    def send(self, asked: dict[str, Any], source: int, results: int) -> None:
        """source, results: descriptors."""
        passed = array.array("i", [source, results])
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)
        self._requests.sendmsg([json.dumps(asked).encode()], [rights])


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
