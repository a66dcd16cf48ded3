"""The borrower's side of leases: accepts what is offered, and leaves what is recalled.

A recall is asked, drained and answered: no slot of the lease is taken any more, transfers in
progress end, copies move to the host or are dropped, and then the table says that the borrower has
left. Copies in the pages of a lender that has died are whole, because the mapping keeps the memory:
they move to the host as after a recall, without a deadline, and then the memory is unmapped.
All ranks begin, accept, drain and leave in the same round, by the facts of rank 0 (lease_facts.py).
Owner: one Borrowing per session tier that borrows.
"""

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from sglang_live.extensions.lending.channel import (
    BORROW,
    Bell,
    BrokerLink,
    Member,
    Message,
    Partner,
    close_all,
)
from sglang_live.extensions.lending.engine.lease_facts import BorrowerFacts
from sglang_live.extensions.lending.engine.peer_copies import PeerCopies
from sglang_live.extensions.lending.engine.peer_eviction import PeerEviction
from sglang_live.extensions.lending.engine.peer_memory import device_of
from sglang_live.extensions.lending.engine.peer_pool import PeerPool
from sglang_live.extensions.lending.engine.shared_memory import SharedMemory, map_shared
from sglang_live.extensions.lending.layout import Geometry, Memory, slots_in
from sglang_live.extensions.lending.meeting import Meeting
from sglang_live.extensions.lending.table import BORROWERS, Lease, LeaseTable

logger = logging.getLogger(__name__)

# Time in which a recall should be answered. What does not fit into it is dropped.
RECALL_S = 0.05
# Share of it for moves to the host; the rest is for rounds of both sides.
_MOVING_SHARE = 0.5


@dataclass(slots=True, eq=False)
class _Lender:
    """A lender.

    Attributes:
        base: first of its slot numbers, once the pair has begun.
        held: leases that have begun, by row.
        is_dead: its process has ended.
    """

    meeting: Meeting
    memory: Memory
    mapped: SharedMemory
    base: int = -1
    held: dict[int, Lease] = field(default_factory=dict)
    is_dead: bool = False

    @property
    def partner(self) -> Partner:
        return self.meeting.partner

    @property
    def table(self) -> LeaseTable:
        return self.meeting.table


class Borrowing:
    """
    Args:
        geometry: of the engine's own pool.
    """

    def __init__(
        self,
        copies: PeerCopies,
        eviction: PeerEviction,
        geometry: Geometry,
        device_pool: Any,
        member: Member,
    ):
        self._copies = copies
        self._eviction = eviction
        self._geometry = geometry
        self._device_pool = device_pool
        self._member = member
        self._device = device_of(device_pool)
        self._met: dict[str, _Lender] = {}  # by pair: those that have not begun
        self._refused: set[int] = set()  # processes of lenders whose memory cannot be mapped
        self._lenders: dict[str, _Lender] = {}
        self.bell = Bell()
        self.is_draining = False
        self.counts = dict.fromkeys(
            ("leases_accepted", "leases_left", "lenders_lost", "lenders_refused"), 0.0
        )
        self._link = BrokerLink(member.path, self._introduction)
        self._told: BorrowerFacts | None = None
        self._has_asked = False

    # --- several ranks ---

    @property
    def _is_alone(self) -> bool:
        return self._member.n_ranks == 1

    def facts_to_tell(self) -> BorrowerFacts | None:
        """On rank 0, once a round: what all ranks are to be told in it, if there are several and
        there is something new.
        """
        if self._is_alone or self._has_asked:
            return None
        facts = self._facts()
        if not (facts.begun or facts.lost or facts.leases):
            return None
        self._has_asked = True  # until they have acted on it
        return facts

    def told(self, facts: BorrowerFacts) -> None:
        """On all ranks, before step()."""
        self._told = facts

    def _facts(self) -> BorrowerFacts:
        now_s = time.monotonic()
        self._look(now_s)
        begun = {pair: one for pair, one in self._met.items() if one.meeting.can_begin}
        for lender in begun.values():
            lender.meeting.begin()
        alive = {pair: one for pair, one in self._lenders.items() if not one.is_dead}
        lost = [pair for pair, lender in alive.items() if lender.meeting.any_ended]
        leases = [
            (pair, lease)
            for pair, lender in (alive | begun).items()
            for lease in lender.table.leases()
            if lease.recalled_ns or lease.row not in lender.held
        ]
        return BorrowerFacts(
            now_s=now_s,
            host_rate=self._eviction.host_rate,
            begun=tuple(begun),
            lost=tuple(lost),
            leases=tuple(leases),
        )

    # --- a round ---

    def step(self) -> None:
        """To be called once a round."""
        if self._member.rank > 0:
            self._look(time.monotonic())
        facts = self._facts() if self._is_alone else self._told
        self.is_draining = False
        if facts is not None:
            self._told = None
            self._has_asked = False
            self._follow(facts)
        for pair, lender in list(self._lenders.items()):
            if lender.is_dead:
                self._leave_dead(pair, lender)
                continue
            for lease in lender.held.values():
                n_used = self._copies.slots.n_used((lender.base, lease.row))
                lender.table.set_used(lease, n_used)

    def _look(self, now_s: float) -> None:
        """Note what this rank sees."""
        self.bell.silence()
        for message, fds in self._link.receive(now_s):
            self._meet(message, fds, now_s)
        for lender in (*self._met.values(), *self._lenders.values()):
            lender.meeting.look(now_s)
        for pair in [pair for pair, lender in self._met.items() if lender.meeting.is_over]:
            lender = self._met.pop(pair)
            lender.partner.close()
            lender.mapped.close()

    def _introduction(self) -> tuple[Message, tuple[int, ...]]:
        lenders = (*self._met.values(), *self._lenders.values())
        message = {
            "role": BORROW,
            "name": self._member.name,
            "rank": self._member.rank,
            "n_ranks": self._member.n_ranks,
            "pid": os.getpid(),
            "kind": self._device.type,
            "partners": [lender.partner.pid for lender in lenders],
        }
        return message, (self.bell.fd,)

    def _meet(self, message: Message, fds: list[int], now_s: float) -> None:
        if len(fds) != 4 or message["pid"] in self._refused:
            close_all(fds)
            return
        memory_fd, table_fd, bell_fd, pidfd = fds
        memory = Memory(
            kind=message["kind"],
            offsets=tuple(message["offsets"]),
            row_bytes=tuple(message["row_bytes"]),
            n_bytes=message["n_bytes"],
        )
        try:
            mapped = map_shared(memory_fd, memory.n_bytes, self._device)
        except (OSError, RuntimeError, ValueError) as error:  # as of GPUs without peer access
            close_all(fds[1:])
            self._refuse(message, error)
            return
        partner = Partner(message["meets"], message["pid"], pidfd, Bell(bell_fd))
        table = LeaseTable(table_fd, self._member.n_ranks, self._member.rank)
        meeting = Meeting(partner, table, BORROWERS, now_s)
        self._met[message["pair"]] = _Lender(meeting=meeting, memory=memory, mapped=mapped)

    def _refuse(self, message: Message, error: Exception) -> None:
        """The pair does not begin, so the lender offers nothing."""
        self._refused.add(message["pid"])
        self.counts["lenders_refused"] += 1
        logger.error("borrows_nothing_from %s error=%s", message["meets"], error)

    def _follow(self, facts: BorrowerFacts) -> None:
        for pair in facts.begun:
            self._begin(pair)
        for pair in facts.lost:
            self._lose(self._lenders[pair])
        for pair, lease in facts.leases:
            lender = self._lenders[pair]
            if lender.is_dead:
                continue
            if lease.recalled_ns:
                self._leave(lender, lease, facts)
            else:
                self._accept(lender, lease)

    def _begin(self, pair: str) -> None:
        lender = self._lenders[pair] = self._met.pop(pair)
        if self._member.rank > 0:
            lender.meeting.begin()
        pool = PeerPool(lender.mapped.raw, self._geometry, self._device_pool)
        lender.base = self._copies.add_lender(pool)
        logger.info("borrows_from %s pid=%d", lender.partner.name, lender.partner.pid)

    # --- a lender that lives ---

    def _accept(self, lender: _Lender, lease: Lease) -> None:
        ranges = lender.memory.ranges(lease.first, lease.n_slots)
        slots = lender.base + slots_in(ranges, self._geometry.envelope_bytes)
        self._copies.slots.add((lender.base, lease.row), slots)
        lender.held[lease.row] = lease
        lender.table.accept(lease)
        self.counts["leases_accepted"] += 1

    def _leave(self, lender: _Lender, lease: Lease, facts: BorrowerFacts) -> None:
        if lease.row in lender.held:
            waited_s = facts.now_s - lease.recalled_ns / 1e9
            left_s = max(0.0, _MOVING_SHARE * RECALL_S - waited_s)
            self._drain(lender, lease.row, _Deadline(left_s, facts.host_rate))
            if self._copies.slots.n_used((lender.base, lease.row)):
                self.is_draining = True
                return
            self._forget(lender, lease.row)
        lender.table.leave(lease)
        lender.partner.bell.ring()
        self.counts["leases_left"] += 1

    def _drain(self, lender: _Lender, row: int, deadline: "_Deadline | None") -> None:
        """Begin to move or drop all copies in a lease that are not busy.

        Args:
            deadline: of the moves; None: no limit.
        """
        key = (lender.base, row)
        self._copies.slots.close(key)
        for session_id in self._eviction.by_next_use(self._copies.sessions_in(key)):
            copy = self._copies.of(session_id)
            assert copy is not None
            if copy.busy:
                continue
            is_move = self._eviction.n_on_device(session_id) < copy.end
            n_bytes = len(copy.slots) * self._geometry.envelope_bytes
            if deadline is not None and is_move and not deadline.leaves(n_bytes):
                self._eviction.drop(session_id)
                continue
            self._eviction.move(session_id, may_drop=True)

    def _forget(self, lender: _Lender, row: int) -> None:
        self._copies.slots.remove((lender.base, row))
        del lender.held[row]

    # --- a lender that has died ---

    def _lose(self, lender: _Lender) -> None:
        lender.is_dead = True
        self.counts["lenders_lost"] += 1
        logger.warning("lender_lost %s pid=%d", lender.partner.name, lender.partner.pid)

    def _leave_dead(self, pair: str, lender: _Lender) -> None:
        for row, lease in list(lender.held.items()):
            self._drain(lender, row, None)
            if not self._copies.slots.n_used((lender.base, row)):
                self._forget(lender, row)
                lender.table.leave(lease)  # other ranks of it may live for some time
        if lender.held:
            self.is_draining = True
            return
        self._copies.remove_lender(lender.base)
        lender.mapped.close()
        lender.partner.close()
        del self._lenders[pair]

    def report(self) -> dict[str, float]:
        held = [len(lender.held) for lender in self._lenders.values()]
        return {
            **self.counts,
            "leases_held": float(sum(held)),
            "tokens_in_dead_lenders": float(
                sum(
                    self._copies.slots.n_used((lender.base, row))
                    for lender in self._lenders.values()
                    if lender.is_dead
                    for row in lender.held
                )
            ),
        }


@dataclass(slots=True)
class _Deadline:
    """Time for moves to the host.

    Attributes:
        bytes_per_s: of the link; None: not measured yet.
    """

    left_s: float
    bytes_per_s: float | None

    def leaves(self, n_bytes: int) -> bool:
        """Whether there is time for this move, which takes it."""
        self.left_s -= n_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return self.left_s >= 0
