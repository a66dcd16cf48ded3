"""The state of one lender's leases, in memory that lender and borrower share.

Each word has one writer, so no state is lost to a race, and neither side waits for the other: the
lender offers and recalls, the borrower accepts and leaves. A row's number of uses tells an answer
to its present lease from one to an earlier lease of the row.

    lender:    FREE -> OFFERED -> RECALLED -> FREE, when it has seen that the borrower left
    borrower:  ACTIVE, LEFT

A table is made anew for each pair of processes.
"""

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

N_ROWS = 256
FREE, OFFERED, RECALLED = 0, 1, 2
ACTIVE, LEFT = 1, 2
_LENDER, _BORROWER, _FIRST, _N_SLOTS, _RECALLED_NS, _USED = range(6)
_WORDS = 8
_PHASES = 4


@dataclass(frozen=True, slots=True)
class Lease:
    """
    Attributes:
        row: in the table.
        use: number of the row's uses.
        first, n_slots: of the lender's slots.
        recalled_ns: when it was recalled, by time.monotonic_ns(); 0: it is not.
    """

    row: int
    use: int
    first: int
    n_slots: int
    recalled_ns: int


class LeaseTable:
    """
    Args:
        fd: of the table's file; None: a new one.
    """

    N_BYTES = 8 * N_ROWS * _WORDS

    def __init__(self, fd: int | None = None):
        own = fd is None
        if fd is None:
            fd = os.memfd_create("sglang_live-leases", os.MFD_CLOEXEC)
            os.ftruncate(fd, self.N_BYTES)
        mapped = mmap.mmap(fd, self.N_BYTES)
        self._rows: npt.NDArray[np.int64] = np.frombuffer(mapped, np.int64).reshape(N_ROWS, _WORDS)
        self.fd = fd if own else -1
        if not own:
            os.close(fd)

    def close(self) -> None:
        """Close the file; the mapping ends with the table."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # --- the lender ---

    def offer(self, first: int, n_slots: int) -> int | None:
        """Returns the lease's row; None if all rows are in use."""
        free = np.flatnonzero(self._rows[:, _LENDER] % _PHASES == FREE)
        if not len(free):
            return None
        at = int(free[0])
        row = self._rows[at]
        use = int(row[_LENDER]) // _PHASES + 1
        row[_FIRST], row[_N_SLOTS], row[_RECALLED_NS], row[_USED] = first, n_slots, 0, 0
        row[_LENDER] = use * _PHASES + OFFERED  # last: it makes the others valid
        return at

    def recall(self, row: int, now_ns: int) -> None:
        word = int(self._rows[row, _LENDER])
        self._rows[row, _RECALLED_NS] = now_ns
        self._rows[row, _LENDER] = word - word % _PHASES + RECALLED

    def release(self, row: int) -> None:
        """To be called when the lender has its pages back."""
        word = int(self._rows[row, _LENDER])
        self._rows[row, _LENDER] = word - word % _PHASES + FREE

    def has_left(self, row: int) -> bool:
        return self._answer(row) == LEFT

    def is_active(self, row: int) -> bool:
        return self._answer(row) == ACTIVE

    def used(self, row: int) -> int:
        """Slots of the borrower's that it uses in the lease."""
        return int(self._rows[row, _USED])

    # --- the borrower ---

    def leases(self) -> list[Lease]:
        """Leases that are offered or recalled, and that the borrower has not left."""
        words = self._rows[:, _LENDER]
        return [
            self._lease(int(row))
            for row in np.flatnonzero(words % _PHASES != FREE)
            if self._answer(int(row)) != LEFT
        ]

    def _lease(self, row: int) -> Lease:
        word, first, n_slots, recalled_ns = (
            int(self._rows[row, column]) for column in (_LENDER, _FIRST, _N_SLOTS, _RECALLED_NS)
        )
        recalled_ns = recalled_ns if word % _PHASES == RECALLED else 0
        return Lease(row, word // _PHASES, first, n_slots, recalled_ns)

    def accept(self, lease: Lease) -> None:
        self._rows[lease.row, _BORROWER] = lease.use * _PHASES + ACTIVE

    def set_used(self, lease: Lease, n: int) -> None:
        self._rows[lease.row, _USED] = n

    def leave(self, lease: Lease) -> None:
        """The borrower does not touch the lease's pages any more."""
        self._rows[lease.row, _BORROWER] = lease.use * _PHASES + LEFT

    def _answer(self, row: int) -> int:
        lender, borrower = int(self._rows[row, _LENDER]), int(self._rows[row, _BORROWER])
        is_of_this_use = borrower // _PHASES == lender // _PHASES and lender % _PHASES != FREE
        return borrower % _PHASES if is_of_this_use else 0
