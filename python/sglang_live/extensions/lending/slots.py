"""Which slots of a borrower's leases are free, and which lease a slot is of.

Owner: engine/peer_copies.py. Slots are numbers; leases are closed before they end, so that
their slots are used no more, and removed when all of them are free.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
_NONE: Slots = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class _Lease:
    """
    Attributes:
        slots: all, ascending.
        is_used: of each slot.
        open: whether its slots may be taken.
    """

    slots: Slots
    is_used: npt.NDArray[np.bool_]
    open: bool = True

    @property
    def n_used(self) -> int:
        return int(self.is_used.sum())


class PeerSlots:
    def __init__(self) -> None:
        self._leases: dict[Hashable, _Lease] = {}
        self.n_free = 0

    def __contains__(self, lease: Hashable) -> bool:
        return lease in self._leases

    @property
    def n_open(self) -> int:
        """Slots of open leases, used or free."""
        return sum(len(lease.slots) for lease in self._leases.values() if lease.open)

    def add(self, lease: Hashable, slots: Slots) -> None:
        """Raises ValueError if the lease is there already."""
        if lease in self._leases:
            raise ValueError(f"lease {lease} has begun already")
        ascending = np.sort(slots)
        self._leases[lease] = _Lease(ascending, np.zeros(len(slots), bool))
        self.n_free += len(slots)

    def take(self, n: int) -> Slots | None:
        """Returns n free slots of open leases, the oldest leases first; None if fewer are free.

        A lender recalls the leases first of which the least is used, so the others should be full.
        """
        if n > self.n_free:
            return None
        found = [_NONE]
        for lease in self._leases.values():
            if n <= 0:
                break
            if lease.open:
                free = np.flatnonzero(~lease.is_used)[:n]
                lease.is_used[free] = True
                found.append(lease.slots[free])
                n -= len(free)
        taken = np.concatenate(found)
        self.n_free -= len(taken)
        return taken

    def free(self, slots: Slots) -> None:
        """Raises ValueError for a slot that is not taken."""
        left = len(slots)
        for lease in self._leases.values():
            at = np.searchsorted(lease.slots, slots)
            at[at == len(lease.slots)] = 0
            at = at[lease.slots[at] == slots] if len(lease.slots) else at[:0]
            if not lease.is_used[at].all():
                raise ValueError("a slot is freed twice")
            lease.is_used[at] = False
            left -= len(at)
            self.n_free += len(at) if lease.open else 0
        if left:
            raise ValueError(f"{left} slots are of no lease")

    def free_all(self) -> None:
        for lease in self._leases.values():
            lease.is_used[:] = False
        self.n_free = self.n_open

    def close(self, lease: Hashable) -> None:
        """Take no more slots of the lease."""
        found = self._leases[lease]
        if found.open:
            found.open = False
            self.n_free -= len(found.slots) - found.n_used

    def n_used(self, lease: Hashable) -> int:
        return self._leases[lease].n_used

    def touches(self, lease: Hashable, slots: Slots) -> bool:
        """Whether any of the slots is of the lease."""
        return bool(np.isin(slots, self._leases[lease].slots).any())

    def remove(self, lease: Hashable) -> None:
        """Raises ValueError if a slot of the lease is still used."""
        found = self._leases[lease]
        if found.n_used:
            raise ValueError(f"{found.n_used} slots of lease {lease} are used")
        self.close(lease)
        del self._leases[lease]
