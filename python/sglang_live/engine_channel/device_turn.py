"""A stage's turns on a device that it shares: its end of the connection to the arbiter.

In: by when its next work should begin. Out: whether it may begin now. Without an
arbiter the stage works as if it were alone, which it counts, and connects again.
Owner: one DeviceTurn per stage or scheduler; not thread-safe.
"""

import os
import socket
import struct
import time
from pathlib import Path

TURNS_ENV = "SGLANG_LIVE_DEVICE_TURNS"
# What, number of the wish, and a time.monotonic(): by which the work should begin, or at which it
# will have ended.
MESSAGE = struct.Struct("<cQd")
ASK, LAUNCHED, RELEASE, GRANT = b"A", b"L", b"R", b"G"
_RECONNECT_S = 0.5


class DeviceTurn:
    """
    Args:
        path: of the arbiter's socket.
    Attributes:
        has: whether the device is this stage's.
        counts: turns, seconds between asking and being granted, and work without a turn because
            there was no arbiter.
    """

    def __init__(self, path: Path):
        self._path = path
        self._socket: socket.socket | None = None
        self._lost: socket.socket | None = None
        self._number = 0
        self._asked_s = 0.0
        self._retry_s = 0.0
        self._deadline_s = 0.0
        self.asks = self.has = False
        self.counts = {"device_turns": 0.0, "device_turn_wait_s": 0.0, "device_turns_missed": 0.0}
        self._connect()

    @classmethod
    def from_env(cls) -> "DeviceTurn | None":
        """None: the stage shares no device, or has it as it comes."""
        path = os.environ.get(TURNS_ENV)
        return cls(Path(path)) if path else None

    @property
    def socket(self) -> socket.socket | None:
        """Readable when the device is granted; None: there is no arbiter."""
        return self._socket

    def ask(self, deadline_s: float) -> None:
        """Want the device. Asking again before it is granted may bring the deadline forward."""
        if self.has or (self.asks and deadline_s >= self._deadline_s):
            return
        if not self.asks:
            self._number += 1
            self._asked_s = time.monotonic()
        self.asks = True
        self._deadline_s = deadline_s
        self._send(ASK, deadline_s)

    def poll(self) -> bool:
        """Whether the device is this stage's now."""
        while self._socket is not None and self.asks:
            try:
                data = self._socket.recv(MESSAGE.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:
                self._lose()
                break
            # A grant may cross the withdrawal of the wish that it answers.
            if MESSAGE.unpack(data)[1] == self._number:
                self._begin("device_turns")
        if self.asks:
            self._begin("device_turns_missed")
            self._connect()
        return self.has

    def ends_at(self, at_s: float) -> None:
        """The work was launched, and will end then: the next stage may have the device a little
        before, to launch behind it."""
        if self.has:
            self._send(LAUNCHED, at_s)

    def release(self) -> None:
        """The work on the device is done, or is not wanted any more."""
        if self.has or self.asks:
            self.has = self.asks = False
            self._send(RELEASE, 0.0)

    def _begin(self, name: str) -> None:
        self.asks = False
        self.has = True
        self.counts[name] += 1
        self.counts["device_turn_wait_s"] += time.monotonic() - self._asked_s

    def _send(self, what: bytes, at_s: float) -> None:
        if self._socket is not None:
            try:
                self._socket.send(MESSAGE.pack(what, self._number, at_s))
            except OSError:
                self._lose()

    def _lose(self) -> None:
        # Open until the next one is lost: who waits for its descriptor still has to forget it.
        if self._lost is not None:
            self._lost.close()
        self._lost = self._socket
        self._socket = None

    def _connect(self) -> None:
        if self._socket is not None or time.monotonic() < self._retry_s:
            return
        self._retry_s = time.monotonic() + _RECONNECT_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            return
        self._socket = connection
