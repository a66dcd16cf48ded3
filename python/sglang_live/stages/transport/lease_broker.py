"""Introduces engines that lend KV memory to engines that borrow it, on one host.

In: connections of schedulers' processes to a socket in the run directory. Out: to each of a pair
the other's file descriptors: memory, table, bell, and a pidfd. Afterwards the pair needs no broker:
state is in the table, and each side watches the other's pidfd. So the broker may end and be started
again at any time; engines connect again and say whom they know.
Owner: one LeaseBroker per supervisor that starts an engine of either kind.
"""

import asyncio
import logging
import os
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sglang_live.engine_channel.lease_channel import (
    BORROW,
    LEND,
    SOCKET_NAME,
    LeaseChannel,
    Message,
    close_all,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Engine:
    """A connected engine.

    Attributes:
        pid: of its process, as the kernel knows it.
        message: its latest introduction.
        fds: that it has sent with it.
        partners: processes that it knows, by pid.
    """

    channel: LeaseChannel
    pid: int
    message: Message = field(default_factory=dict)
    fds: list[int] = field(default_factory=list)
    partners: list[int] = field(default_factory=list)

    @property
    def role(self) -> str:
        return str(self.message.get("role", ""))

    @property
    def name(self) -> str:
        return str(self.message.get("name", ""))


class LeaseBroker:
    """
    Attributes:
        counts: pairs introduced, and refusals by reason.
    """

    def __init__(self, path: Path):
        self._path = path
        self._listener: socket.socket | None = None
        self._engines: set[_Engine] = set()
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.setblocking(False)
        listener.bind(str(self._path))
        self._path.chmod(0o600)
        listener.listen()
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._on_connect)

    def stop(self) -> None:
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for engine in list(self._engines):
            self._drop(engine)
        self._path.unlink(missing_ok=True)

    def _on_connect(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone already
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", credentials)
        engine = _Engine(LeaseChannel(connection), pid)
        self._engines.add(engine)
        loop = asyncio.get_running_loop()
        loop.add_reader(engine.channel.fileno(), self._on_message, engine)

    def _on_message(self, engine: _Engine) -> None:
        try:
            received = engine.channel.receive()
        except ValueError as error:
            log.error("lease_message_bad pid=%d error=%s", engine.pid, error)
            self._drop(engine)
            return
        if received is not None:
            self._take(engine, *received)
        for one in [one for one in self._engines if not one.channel.is_open]:
            self._drop(one)

    def _take(self, engine: _Engine, message: Message, fds: list[int]) -> None:
        close_all(engine.fds)
        engine.message, engine.fds = message, fds
        engine.partners = list(message.get("partners", ()))
        reason = self._refusal(engine)
        if reason is not None:
            self.counts[f"refused_{reason.partition(':')[0]}"] += 1
            log.warning("lease_refused %s reason=%s", engine.name, reason)
            engine.channel.send({"refused": reason})
            self._drop(engine)
            return
        self._introduce()

    def _refusal(self, engine: _Engine) -> str | None:
        n_fds = {LEND: 3, BORROW: 1}.get(engine.role)
        if n_fds is None or len(engine.fds) != n_fds:
            return f"protocol: {engine.role} with {len(engine.fds)} files"
        if engine.pid <= 0 or engine.message.get("pid") != engine.pid:
            # Its pidfd would be of another process, or of none.
            return "namespace: the engine has its own PID namespace"
        return None

    def _introduce(self) -> None:
        """Introduce each lender without a borrower to the borrower with the fewest lenders."""
        for lender in [engine for engine in self._engines if engine.role == LEND]:
            borrowers = [one for one in self._engines if _could_borrow(one, lender)]
            if lender.partners or not borrowers:
                continue
            borrower = min(borrowers, key=lambda one: (len(one.partners), one.name))
            self._introduce_pair(lender, borrower)

    def _introduce_pair(self, lender: _Engine, borrower: _Engine) -> None:
        pidfds: list[int] = []
        try:
            pidfds = [os.pidfd_open(lender.pid), os.pidfd_open(borrower.pid)]
        except OSError as error:  # one of them has just ended
            close_all(pidfds)
            log.info("lease_pair_gone %s %s error=%s", lender.name, borrower.name, error)
            return
        of_lender, of_borrower = pidfds
        memory, table, bell = lender.fds
        to_borrower = {**lender.message, "meets": lender.name}
        borrower.channel.send(to_borrower, (memory, table, bell, of_lender))
        to_lender = {"meets": borrower.name, "pid": borrower.pid}
        lender.channel.send(to_lender, (borrower.fds[0], of_borrower))
        close_all(pidfds)
        for one, other in ((lender, borrower), (borrower, lender)):
            one.partners.append(other.pid)
        self.counts["introduced"] += 1
        log.info("lease_pair lender=%s borrower=%s", lender.name, borrower.name)

    def _drop(self, engine: _Engine) -> None:
        self._engines.discard(engine)
        asyncio.get_running_loop().remove_reader(engine.channel.fileno())
        engine.channel.close()
        close_all(engine.fds)
        engine.fds = []
        for other in self._engines:
            # A lender says itself when it has no borrower any more.
            if other.role == BORROW and engine.pid in other.partners:
                other.partners.remove(engine.pid)


def _could_borrow(engine: _Engine, lender: _Engine) -> bool:
    """A device uses memory of its own kind only."""
    return engine.role == BORROW and engine.message.get("kind") == lender.message.get("kind")


def lease_socket(run_dir: str) -> Path:
    return Path(run_dir) / SOCKET_NAME
