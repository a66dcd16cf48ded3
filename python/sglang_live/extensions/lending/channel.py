"""Messages between engines that lend or borrow and the server's broker, with file descriptors.

Wire: one JSON object per packet of a Unix socket (SOCK_SEQPACKET) in the server's run directory.
Neither side ever waits: what cannot be sent or received at once ends the connection.
"""

import json
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# "lend:<socket>" or "borrow:<socket>".
LEASES_ENV = "SGLANG_LIVE_LEASES"
LEND, BORROW = "lend", "borrow"
# The broker is in the server's process, which engines do not outlive for long.
RECONNECT_S = 0.5
_MAX_BYTES = 65_536
_MAX_FDS = 4

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of an engine that lends or borrows.

    Attributes:
        name: of the engine, the same on all its ranks.
        path: of the broker's socket.
    """

    name: str
    path: str
    rank: int = 0
    n_ranks: int = 1


def lease_socket(run_dir: Path) -> Path:
    """Of the server's broker."""
    return run_dir / "leases"


class LeaseChannel:
    """One end of a connection. File descriptors that it returns are its user's to close.

    Attributes:
        is_open: False when the other side has ended, or reads nothing.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._socket = connection
        self.is_open = True

    @classmethod
    def connect(cls, path: str) -> "LeaseChannel | None":
        """Returns None if the broker does not listen."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            return None
        return cls(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(fds))
        except OSError:  # the other side has ended, or reads nothing
            self.is_open = False

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message, or None if there is none; is_open tells if there may be more.

        Raises:
            ValueError: it is no JSON object.
        """
        try:
            data, fds, _, _ = socket.recv_fds(
                self._socket, _MAX_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            data, fds = b"", []
        if not data:
            self.is_open = False
            return None
        try:
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError(f"{type(message).__name__} is no object")
        except ValueError:
            close_all(fds)
            raise
        return message, fds

    def close(self) -> None:
        self._socket.close()


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class BrokerLink:
    """An engine's connection to the broker, which is made again whenever the broker is.

    Args:
        introduction: what the engine says of itself, with its file descriptors.
    """

    def __init__(self, path: str, introduction: Callable[[], tuple[Message, tuple[int, ...]]]):
        self._path = path
        self._introduction = introduction
        self._channel: LeaseChannel | None = None
        self._next_try_s = 0.0
        self.refused = ""  # the broker's reason; it is not asked again

    def introduce(self) -> None:
        """Say again who the engine is and whom it knows."""
        if self._channel is not None:
            self._channel.send(*self._introduction())

    def receive(self, now_s: float) -> list[tuple[Message, list[int]]]:
        """To be called once a round: the pairs that the broker introduces."""
        if self.refused:
            return []
        if self._channel is None and now_s >= self._next_try_s:
            self._next_try_s = now_s + RECONNECT_S
            self._channel = LeaseChannel.connect(self._path)
            self.introduce()
        found = []
        while self._channel is not None and (received := self._channel.receive()) is not None:
            message, fds = received
            if "refused" in message:
                close_all(fds)
                self.refused = str(message["refused"])
                break
            found.append((message, fds))
        if self._channel is not None and (self.refused or not self._channel.is_open):
            self.close()
        return found

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class Bell:
    """Wakes another process that waits for input (eventfd).

    Args:
        fd: None: a new one.
    """

    def __init__(self, fd: int | None = None):
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def silence(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:  # it has not rung
            return

    def close(self) -> None:
        os.close(self.fd)


class Partner:
    """The process on the other side of a pair, by its pidfd.

    A socket's end does not tell that a process has ended, and a pid may be another process's soon.
    """

    def __init__(self, name: str, pid: int, pidfd: int, bell: Bell):
        self.name = name
        self.pid = pid
        self.bell = bell
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    @property
    def has_ended(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        os.close(self._pidfd)
        self.bell.close()
