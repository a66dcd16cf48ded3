"""A lender's way to the engine that borrows from it: the broker introduces them, then it is direct.

What is the same for an engine that lends pages of its pool and for a process that has memory alone.
"""

import logging
import os
import time

from sglang_live.extensions.lending.channel import (
    LEND,
    Bell,
    BrokerLink,
    Member,
    Message,
    Partner,
    close_all,
)
from sglang_live.extensions.lending.layout import Memory
from sglang_live.extensions.lending.meeting import Meeting
from sglang_live.extensions.lending.table import LENDERS, LeaseTable

logger = logging.getLogger(__name__)


class LenderLink:
    """
    Args:
        fd: of the memory's file.
        memory: where a lease's slots are in it.

    Attributes:
        table: of the leases, of this lender and its present borrower alone. It is rank 0's; other
            ranks get it when they meet.
        bell: rings when the borrower has left a lease.
        meeting: with the borrower. None: none has been introduced.
    """

    def __init__(self, member: Member, fd: int, memory: Memory):
        self._member = member
        self._fd = fd
        self._memory = memory
        self._own_table = self.table = self._new_table()
        self.bell = Bell()
        self.meeting: Meeting | None = None
        self._broker = BrokerLink(member.path, self._introduction)

    def _new_table(self, fd: int | None = None) -> LeaseTable:
        return LeaseTable(fd, self._member.n_ranks, self._member.rank)

    @property
    def partner(self) -> Partner | None:
        """The borrower, when all ranks have begun."""
        meeting = self.meeting
        return meeting.partner if meeting is not None and meeting.has_begun else None

    @property
    def can_begin(self) -> bool:
        meeting = self.meeting
        return meeting is not None and not meeting.has_begun and meeting.can_begin

    @property
    def is_lost(self) -> bool:
        """Whether all processes of the borrower have ended: until then they may write."""
        meeting = self.meeting
        return meeting is not None and meeting.has_begun and meeting.all_ended

    def receive(self, now_s: float) -> None:
        """To be called once a round: meet the borrower that the broker introduces."""
        self.bell.silence()
        for message, fds in self._broker.receive(now_s):
            self._meet(message, fds)
        if self.meeting is not None:
            self.meeting.look(now_s)
            if self.meeting.is_over:
                self.part()

    def begin(self) -> None:
        """To be called on all ranks in the same round."""
        assert self.meeting is not None
        self.meeting.begin()
        partner = self.meeting.partner
        logger.info("lends_to %s pid=%d", partner.name, partner.pid)

    def part(self) -> None:
        """Be open for another borrower, after this one has ended and its leases are free."""
        assert self.meeting is not None
        partner = self.meeting.partner
        logger.warning("borrower_lost %s pid=%d", partner.name, partner.pid)
        partner.close()
        self.meeting = None
        if self.table is self._own_table:
            # A new table, lest the next borrower read the last one's answers.
            self.table.close()
            self._own_table = self._new_table()
        self.table = self._own_table
        self._broker.introduce()

    def close(self) -> None:
        """End the connection to the broker, which introduces nothing more."""
        self._broker.close()

    def _introduction(self) -> tuple[Message, tuple[int, ...]]:
        message = {
            "role": LEND,
            "name": self._member.name,
            "rank": self._member.rank,
            "n_ranks": self._member.n_ranks,
            "pid": os.getpid(),
            "partners": [] if self.meeting is None else [self.meeting.partner.pid],
            "kind": self._memory.kind,
            "offsets": self._memory.offsets,
            "row_bytes": self._memory.row_bytes,
            "n_bytes": self._memory.n_bytes,
        }
        return message, (self._fd, self._own_table.fd, self.bell.fd)

    def _meet(self, message: Message, fds: list[int]) -> None:
        if self.meeting is not None or len(fds) != 3:
            close_all(fds)
            return
        table, bell, pidfd = fds
        if self._member.rank == 0:
            os.close(table)
        else:
            self.table = self._new_table(table)
        partner = Partner(message["meets"], message["pid"], pidfd, Bell(bell))
        self.meeting = Meeting(partner, self.table, LENDERS, time.monotonic())
