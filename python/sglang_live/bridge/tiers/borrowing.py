"""The borrower's side of leases: accepts what is offered, and leaves what is recalled.

A recall is asked, drained and answered: no slot of the lease is taken any more, transfers in
progress end, copies move to the host or are dropped, and then the table says that the borrower has
left. Copies in the pages of a lender that has died are whole, because the mapping keeps the memory:
they move to the host as after a recall, without a deadline, and then the memory is unmapped.
Owner: one Borrowing per session tier that borrows.
"""

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from sglang_live.bridge.memory.shared_memory import Launched, SharedMemory, map_shared
from sglang_live.bridge.session.compact import POISON_ENV
from sglang_live.bridge.tiers.peer_copies import PeerCopies
from sglang_live.bridge.tiers.peer_eviction import PeerEviction
from sglang_live.bridge.tiers.peer_memory import device_of
from sglang_live.bridge.tiers.peer_pool import PeerPool
from sglang_live.engine_channel.lease_channel import (
    BORROW,
    Bell,
    BrokerLink,
    Message,
    Partner,
    close_all,
)
from sglang_live.engine_channel.lease_table import Lease, LeaseTable
from sglang_live.kv.peer_layout import Geometry, Memory, slots_in

logger = logging.getLogger(__name__)

# Time in which a recall should be answered. What does not fit into it is dropped.
RECALL_S = 0.05
# Share of it for moves to the host; the rest is for rounds of both sides.
_MOVING_SHARE = 0.5


@dataclass(slots=True, eq=False)
class _Lender:
    """A lender.

    Attributes:
        mapped: its memory; None if this device cannot use it: then no lease is accepted, and each
            that is recalled is left.
        base: first of its slot numbers.
        held: leases that have begun, by row.
        is_dead: its process has ended.
    """

    partner: Partner
    table: LeaseTable
    memory: Memory
    mapped: SharedMemory | None
    base: int = 0
    held: dict[int, Lease] = field(default_factory=dict)
    is_dead: bool = False


class Borrowing:
    """
    Args:
        geometry: of the engine's own pool.
        path: of the broker's socket.
    """

    def __init__(
        self,
        copies: PeerCopies,
        eviction: PeerEviction,
        geometry: Geometry,
        device_pool: Any,
        name: str,
        path: str,
    ):
        self._copies, self._eviction = copies, eviction
        self._geometry, self._device_pool, self._name = geometry, device_pool, name
        self._device = device_of(device_pool)
        self._lenders: dict[int, _Lender] = {}  # by pid
        self.bell = Bell()
        self.is_draining = False
        self._poisons = os.environ.get(POISON_ENV) == "1"
        self.counts = dict.fromkeys(
            ("leases_accepted", "leases_left", "lenders_lost", "lenders_refused"), 0.0
        )
        self._link = BrokerLink(path, self._introduction)

    def step(self) -> None:
        """To be called once a round."""
        self.bell.silence()
        for message, fds in self._link.receive(time.monotonic()):
            self._meet(message, fds)
        self.is_draining = False
        for lender in list(self._lenders.values()):
            if not lender.is_dead and lender.partner.has_ended:
                self._lose(lender)
            if lender.is_dead:
                self._leave_dead(lender)
            else:
                self._follow(lender)

    def _introduction(self) -> tuple[Message, tuple[int, ...]]:
        message = {
            "role": BORROW,
            "name": self._name,
            "pid": os.getpid(),
            "kind": self._device.type,
            "partners": list(self._lenders),
        }
        return message, (self.bell.fd,)

    def _meet(self, message: Message, fds: list[int]) -> None:
        if len(fds) != 4 or message["pid"] in self._lenders:
            close_all(fds)
            return
        memory_fd, table_fd, bell_fd, pidfd = fds
        memory = Memory(
            kind=message["kind"],
            offsets=tuple(message["offsets"]),
            row_bytes=tuple(message["row_bytes"]),
            n_bytes=message["n_bytes"],
        )
        lender = _Lender(
            partner=Partner(message["meets"], message["pid"], pidfd, Bell(bell_fd)),
            table=LeaseTable(table_fd),
            memory=memory,
            mapped=self._mapped(message["meets"], memory_fd, memory),
        )
        self._lenders[message["pid"]] = lender
        if lender.mapped is None:
            return
        pool = PeerPool(lender.mapped.raw, self._geometry, self._device_pool)
        lender.base = self._copies.add_lender(pool)
        logger.info("borrows_from %s pid=%d", lender.partner.name, lender.partner.pid)

    def _mapped(self, name: str, fd: int, memory: Memory) -> SharedMemory | None:
        try:
            return map_shared(fd, memory.n_bytes, self._device)
        except (OSError, RuntimeError, ValueError) as error:  # as of GPUs without peer access
            self.counts["lenders_refused"] += 1
            logger.error("borrows_nothing_from %s error=%s", name, error)
            return None

    # --- a lender that lives ---

    def _follow(self, lender: _Lender) -> None:
        for lease in lender.table.leases():
            if lease.recalled_ns:
                self._leave(lender, lease)
            elif lease.row not in lender.held and lender.mapped is not None:
                self._accept(lender, lease)
        for lease in lender.held.values():
            lender.table.set_used(lease, self._copies.slots.n_used((lender.base, lease.row)))

    def _accept(self, lender: _Lender, lease: Lease) -> None:
        ranges = lender.memory.ranges(lease.first, lease.n_slots)
        slots = lender.base + slots_in(ranges, self._geometry.envelope_bytes)
        self._copies.slots.add((lender.base, lease.row), slots)
        lender.held[lease.row] = lease
        lender.table.accept(lease)
        self.counts["leases_accepted"] += 1

    def _leave(self, lender: _Lender, lease: Lease) -> None:
        if lease.row in lender.held:
            waited_s = time.monotonic() - lease.recalled_ns / 1e9
            self._drain(lender, lease.row, max(0.0, _MOVING_SHARE * RECALL_S - waited_s))
            if self._copies.slots.n_used((lender.base, lease.row)):
                self.is_draining = True
                return
            self._forget(lender, lease.row)
        if self._poisons:
            self._poison(lender, lease)
        lender.table.leave(lease)
        lender.partner.bell.ring()
        self.counts["leases_left"] += 1

    def _drain(self, lender: _Lender, row: int, left_s: float | None) -> None:
        """Begin to move or drop all copies in a lease that are not busy.

        Args:
            left_s: time for moves; None: no limit.
        """
        key = (lender.base, row)
        self._copies.slots.close(key)
        for session_id in self._eviction.by_next_use(self._copies.sessions_in(key)):
            copy = self._copies.of(session_id)
            assert copy is not None
            if copy.busy:
                continue
            move_s = self._move_s(len(copy.slots))
            if left_s is not None and self._eviction.n_on_device(session_id) < copy.end:
                left_s -= move_s
                if left_s < 0:
                    self._eviction.drop(session_id)
                    continue
            self._eviction.move(session_id, may_drop=True)

    def _move_s(self, n_slots: int) -> float:
        rate = self._eviction.host_rate
        return n_slots * self._geometry.envelope_bytes / rate if rate else 0.0

    def _forget(self, lender: _Lender, row: int) -> None:
        self._copies.slots.remove((lender.base, row))
        del lender.held[row]

    def _poison(self, lender: _Lender, lease: Lease) -> None:
        if lender.mapped is None:
            return
        for begin, end in lender.memory.ranges(lease.first, lease.n_slots):
            lender.mapped.raw[begin:end] = 0xFF  # NaN in every floating-point type
        Launched(self._device).synchronize()

    # --- a lender that has died ---

    def _lose(self, lender: _Lender) -> None:
        lender.is_dead = True
        self.counts["lenders_lost"] += 1
        logger.warning("lender_lost %s pid=%d", lender.partner.name, lender.partner.pid)

    def _leave_dead(self, lender: _Lender) -> None:
        for row in list(lender.held):
            self._drain(lender, row, None)
            if not self._copies.slots.n_used((lender.base, row)):
                self._forget(lender, row)
        if lender.held:
            self.is_draining = True
            return
        if lender.mapped is not None:
            self._copies.remove_lender(lender.base)
            lender.mapped.close()
        lender.partner.close()
        del self._lenders[lender.partner.pid]

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
