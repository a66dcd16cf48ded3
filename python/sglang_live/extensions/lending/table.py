"""The state of one lender's leases, in memory that lender and borrower share.

Each word has one writer, so no state is lost to a race, and neither side waits for the other: the
lender offers and recalls, the borrower accepts and leaves. A row's number of uses tells an answer
to its present lease from one to an earlier lease of the row.

    lender:    FREE -> OFFERED -> RECALLED -> FREE, when it has seen that the borrower left
    borrower:  ACTIVE, LEFT

With several ranks each rank of both sides has its own words, because each has memory of its own: a
lease is there when all ranks of the lender have offered it, and has been left when all ranks of the
borrower have left it. Only rank 0 of a side reads what the other side has written, and tells its
ranks (extensions/lending/engine/lease_facts.py).
A table is made anew for each pair of engines.
"""

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

N_ROWS = 256
FREE, OFFERED, RECALLED = 0, 1, 2
ACTIVE, LEFT = 1, 2
LENDERS, BORROWERS = 0, 1  # the two sides
_FIRST, _N_SLOTS, _RECALLED_NS, _USED = range(4)
_FACTS = 4
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
        n_ranks: of either side.
        rank: whose words this process writes.
    """

    def __init__(self, fd: int | None = None, n_ranks: int = 1, rank: int = 0):
        sizes = (N_ROWS * _FACTS, N_ROWS * n_ranks, N_ROWS * n_ranks, 2 * n_ranks)
        n_bytes = 8 * sum(sizes)
        own = fd is None
        if fd is None:
            fd = os.memfd_create("sglang_live-leases", os.MFD_CLOEXEC)
            os.ftruncate(fd, n_bytes)
        words: npt.NDArray[np.int64] = np.frombuffer(mmap.mmap(fd, n_bytes), np.int64)
        facts, lender, borrower, states = np.split(words, np.cumsum(sizes[:-1]))
        self._facts = facts.reshape(N_ROWS, _FACTS)  # written by rank 0 of a side
        self._lender = lender.reshape(N_ROWS, n_ranks)
        self._borrower = borrower.reshape(N_ROWS, n_ranks)
        self._states = states.reshape(2, n_ranks)
        self.n_ranks = n_ranks
        self.rank = rank
        self.fd = fd if own else -1
        if not own:
            os.close(fd)

    def close(self) -> None:
        """Close the file; the mapping ends with the table."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # --- the ranks of a side (meeting.py) ---

    def tell(self, side: int, state: int) -> None:
        """Set this rank's state in the pair."""
        self._states[side, self.rank] = state

    def states(self, side: int) -> list[int]:
        """The states of all ranks of a side."""
        states: list[int] = self._states[side].tolist()
        return states

    # --- the lender ---

    def offer(self, first: int, n_slots: int) -> int | None:
        """Returns the lease's row; None if all rows are in use."""
        own = self._lender[:, self.rank]
        free = np.flatnonzero(own % _PHASES == FREE)
        if not len(free):
            return None
        at = int(free[0])
        use = int(own[at]) // _PHASES + 1
        if self.rank == 0:
            self._facts[at] = (first, n_slots, 0, 0)
        own[at] = use * _PHASES + OFFERED  # last: it makes the others valid
        return at

    def recall(self, row: int, now_ns: int) -> None:
        word = int(self._lender[row, self.rank])
        if self.rank == 0:
            self._facts[row, _RECALLED_NS] = now_ns
        self._lender[row, self.rank] = word - word % _PHASES + RECALLED

    def release(self, row: int) -> None:
        """To be called when the lender has its pages back."""
        word = int(self._lender[row, self.rank])
        self._lender[row, self.rank] = word - word % _PHASES + FREE

    def left(self, rows: list[int]) -> list[int]:
        """Those of the rows in use whose present lease all ranks of the borrower have left."""
        if not rows:
            return []
        words, answers = self._lender[rows, 0].tolist(), self._borrower[rows].tolist()
        return [
            row
            for row, word, of_ranks in zip(rows, words, answers, strict=True)
            if of_ranks.count(word - word % _PHASES + LEFT) == self.n_ranks
        ]

    def has_left(self, row: int) -> bool:
        return self._lender[row, 0] % _PHASES != FREE and bool(self.left([row]))

    def is_active(self, row: int) -> bool:
        return self._answer(row) == ACTIVE

    def used(self, row: int) -> int:
        """Slots of the borrower's that it uses in the lease, on each of its ranks."""
        return int(self._facts[row, _USED])

    # --- the borrower ---

    def leases(self) -> list[Lease]:
        """Leases that all ranks have offered, recalled ones among them, and that the borrower's
        rank 0 has not left.
        """
        rows = np.flatnonzero(self._lender[:, 0] % _PHASES)
        if not len(rows):
            return []
        words, answers = self._lender[rows].tolist(), self._borrower[rows, 0].tolist()
        facts = self._facts[rows].tolist()  # read after the words that make them valid
        return [
            Lease(row, of_ranks[0] // _PHASES, first, n_slots, _recalled_ns(of_ranks[0], asked_ns))
            for row, of_ranks, answer, (first, n_slots, asked_ns, _) in zip(
                rows.tolist(), words, answers, facts, strict=True
            )
            if answer != of_ranks[0] - of_ranks[0] % _PHASES + LEFT and _is_of_all(of_ranks)
        ]

    def accept(self, lease: Lease) -> None:
        self._borrower[lease.row, self.rank] = lease.use * _PHASES + ACTIVE

    def set_used(self, lease: Lease, n: int) -> None:
        if self.rank == 0:
            self._facts[lease.row, _USED] = n

    def leave(self, lease: Lease) -> None:
        """This rank of the borrower does not touch the lease's pages any more."""
        self._borrower[lease.row, self.rank] = lease.use * _PHASES + LEFT

    def _answer(self, row: int) -> int:
        """Of the borrower's rank 0."""
        lender, borrower = int(self._lender[row, 0]), int(self._borrower[row, 0])
        is_of_this_use = borrower // _PHASES == lender // _PHASES and lender % _PHASES != FREE
        return borrower % _PHASES if is_of_this_use else 0


def _recalled_ns(word: int, asked_ns: int) -> int:
    return asked_ns if word % _PHASES == RECALLED else 0


def _is_of_all(words: list[int]) -> bool:
    """Whether all ranks of the lender have offered this use of a row."""
    use = words[0] // _PHASES
    return len(words) == 1 or all(word // _PHASES == use and word % _PHASES for word in words)
