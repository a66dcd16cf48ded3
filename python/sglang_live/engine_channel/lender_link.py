"""A lender's way to the engine that borrows from it: the broker introduces them, then it is direct.

What is the same for an engine that lends pages of its pool and for a process that has memory alone.
"""

import logging
import os

from sglang_live.engine_channel.lease_channel import (
    LEND,
    Bell,
    BrokerLink,
    Message,
    Partner,
    close_all,
)
from sglang_live.engine_channel.lease_table import LeaseTable
from sglang_live.kv.peer_layout import Memory

logger = logging.getLogger(__name__)


class LenderLink:
    """
    Args:
        fd: of the memory's file.
        memory: where a lease's slots are in it.
        path: of the broker's socket.

    Attributes:
        table: of the leases, of this lender and its present borrower alone.
        bell: rings when the borrower has left a lease.
        partner: the borrower. None: none has been introduced.
    """

    def __init__(self, name: str, fd: int, memory: Memory, path: str):
        self._name, self._fd, self._memory = name, fd, memory
        self.table, self.bell = LeaseTable(), Bell()
        self.partner: Partner | None = None
        self._broker = BrokerLink(path, self._introduction)

    def receive(self, now_s: float) -> None:
        """To be called once a round: meet the borrower that the broker introduces."""
        self.bell.silence()
        for message, fds in self._broker.receive(now_s):
            self._meet(message, fds)

    def part(self) -> None:
        """Be open for another borrower, after this one has ended and its leases are free."""
        assert self.partner is not None
        logger.warning("borrower_lost %s pid=%d", self.partner.name, self.partner.pid)
        self.partner.close()
        self.partner = None
        # A new table, lest the next borrower read the last one's answers.
        self.table.close()
        self.table = LeaseTable()
        self._broker.introduce()

    def close(self) -> None:
        """End the connection to the broker, which introduces nothing more."""
        self._broker.close()

    def _introduction(self) -> tuple[Message, tuple[int, ...]]:
        message = {
            "role": LEND,
            "name": self._name,
            "pid": os.getpid(),
            "partners": [] if self.partner is None else [self.partner.pid],
            "kind": self._memory.kind,
            "offsets": self._memory.offsets,
            "row_bytes": self._memory.row_bytes,
            "n_bytes": self._memory.n_bytes,
        }
        return message, (self._fd, self.table.fd, self.bell.fd)

    def _meet(self, message: Message, fds: list[int]) -> None:
        if self.partner is not None or len(fds) != 2:
            close_all(fds)
            return
        bell, pidfd = fds
        self.partner = Partner(message["meets"], message["pid"], pidfd, Bell(bell))
        logger.info("lends_to %s pid=%d", self.partner.name, self.partner.pid)
