"""Introduces engines that lend KV memory to engines that borrow it, on one host.

In: connections of schedulers' processes to a socket in the run directory. Out: to each of a pair
the other's file descriptors: memory, table, bell, and a pidfd. Engines of several ranks are
introduced rank by rank, when all ranks are there; table and bell are those of rank 0. Afterwards
the pair needs no broker: state is in the table, and each side watches the other's pidfd. So the
broker may end and be started again at any time; engines connect again and say whom they know.
Owner: the server's Lending.
"""

import asyncio
import logging
import os
import socket
import struct
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from sglang_live.extensions.lending.channel import (
    BORROW,
    LEND,
    LeaseChannel,
    Message,
    close_all,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Engine:
    """A connected engine, or one rank of it.

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
        """The same on all ranks of an engine."""
        return str(self.message.get("name", ""))

    @property
    def rank(self) -> int:
        return int(self.message["rank"])

    @property
    def n_ranks(self) -> int:
        return int(self.message["n_ranks"])

    @property
    def kind(self) -> str:
        """Of the device that has, or uses, the memory."""
        return str(self.message.get("kind", ""))

    @property
    def layout(self) -> list[object]:
        """Where a lease's slots are in the memory, which has to be the same on all ranks."""
        return [self.message.get(name) for name in ("offsets", "row_bytes", "n_bytes")]


class LeaseBroker:
    """
    Attributes:
        counts: pairs introduced, and refusals by reason.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._engines: set[_Engine] = set()
        self.counts: Counter[str] = Counter()

    def start(self, path: Path) -> None:
        """path: of the socket, in a folder of this user alone."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._on_connect)

    def stop(self) -> None:
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        Path(self._listener.getsockname()).unlink(missing_ok=True)
        self._listener.close()
        self._listener = None
        for engine in list(self._engines):
            self._drop(engine)

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
        engine.message = message
        engine.fds = fds
        engine.partners = list(message.get("partners", ()))
        reason = self._refusal(engine)
        if reason is not None:
            self._refuse(engine, reason)
            return
        self._introduce()

    def _refuse(self, engine: _Engine, reason: str) -> None:
        self.counts[f"refused_{reason.partition(':')[0]}"] += 1
        log.warning("lease_refused %s reason=%s", engine.name, reason)
        engine.channel.send({"refused": reason})
        self._drop(engine)

    def _refusal(self, engine: _Engine) -> str | None:
        n_fds = {LEND: 3, BORROW: 1}.get(engine.role)
        if n_fds is None or len(engine.fds) != n_fds:
            return f"protocol: {engine.role} with {len(engine.fds)} files"
        rank, n_ranks = (engine.message.get(name) for name in ("rank", "n_ranks"))
        if not isinstance(rank, int) or not isinstance(n_ranks, int) or not 0 <= rank < n_ranks:
            return f"protocol: rank {rank} of {n_ranks}"
        if engine.pid <= 0 or engine.message.get("pid") != engine.pid:
            # Its pidfd would be of another process, or of none.
            return "namespace: the engine has its own PID namespace"
        return None

    def _introduce(self) -> None:
        """Introduce each lender without a borrower to the borrower with the fewest lenders."""
        borrowers = self._whole(BORROW)
        for lender in self._whole(LEND):
            if any(one.partners for one in lender) or not borrowers:
                continue
            fitting = [ranks for ranks in borrowers if _matches(ranks, lender)]
            reason = _pair_refusal(lender, fitting, borrowers)
            if reason is not None:
                for one in lender:
                    self._refuse(one, reason)
                continue
            borrower = min(fitting, key=lambda ranks: (len(ranks[0].partners), ranks[0].name))
            self._introduce_pair(lender, borrower)

    def _whole(self, role: str) -> list[list[_Engine]]:
        """Engines of which all ranks are connected, each by rank."""
        by_name = defaultdict(list)
        for engine in self._engines:
            if engine.role == role:
                by_name[engine.name].append(engine)
        found = [sorted(ranks, key=lambda one: one.rank) for ranks in by_name.values()]
        return [r for r in found if [one.rank for one in r] == list(range(r[0].n_ranks))]

    def _introduce_pair(self, lender: list[_Engine], borrower: list[_Engine]) -> None:
        pidfds: list[int] = []
        try:
            for one in (*lender, *borrower):
                pidfds.append(os.pidfd_open(one.pid))
        except OSError as error:  # one of them has just ended
            close_all(pidfds)
            log.info("lease_pair_gone %s %s error=%s", lender[0].name, borrower[0].name, error)
            return
        pair = uuid.uuid4().hex
        _, table, lenders_bell = lender[0].fds
        (borrowers_bell,) = borrower[0].fds
        of_lenders, of_borrowers = pidfds[: len(lender)], pidfds[len(lender) :]
        for one, other, of_one, of_other in zip(
            lender, borrower, of_lenders, of_borrowers, strict=True
        ):
            to_borrower = {**one.message, "meets": one.name, "pair": pair}
            other.channel.send(to_borrower, (one.fds[0], table, lenders_bell, of_one))
            to_lender = {"meets": other.name, "pid": other.pid}
            one.channel.send(to_lender, (table, borrowers_bell, of_other))
            one.partners.append(other.pid)
            other.partners.append(one.pid)
        close_all(pidfds)
        self.counts["introduced"] += 1
        log.info("lease_pair lender=%s borrower=%s", lender[0].name, borrower[0].name)

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


def _matches(borrower: list[_Engine], lender: list[_Engine]) -> bool:
    """Whether each rank has a partner. A device uses memory of its own kind only."""
    return len(borrower) == len(lender) and borrower[0].kind == lender[0].kind


def _pair_refusal(
    lender: list[_Engine], fitting: list[list[_Engine]], borrowers: list[list[_Engine]]
) -> str | None:
    """Why a lender can lend to none of the borrowers; None if it can."""
    if not fitting and any(len(ranks) == len(lender) for ranks in borrowers):
        kinds = sorted({ranks[0].kind for ranks in borrowers})
        return f"memory: {lender[0].kind} of the lender, {', '.join(kinds)} of the borrower"
    if not fitting:
        others = sorted({len(ranks) for ranks in borrowers})
        return f"ranks: {len(lender)} of the lender, {', '.join(map(str, others))} of the borrower"
    if any(one.layout != lender[0].layout for one in lender):
        return "memory: the lender's ranks differ in it"
    return None
