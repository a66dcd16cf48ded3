"""One rank's part in a pair of engines, until all ranks have begun, and when the other side ends.

The broker introduces rank r of one engine to rank r of the other. Ranks hear of it at different
times, and notice the other's end at different times. Each writes what it has seen into the pair's
table (lease_table.py), where rank 0 of its side reads it. The borrower begins when all its ranks
have met, and then the lender when all of its own have; rank 0 tells that to the others, so that all
ranks of a side begin in the same round. Otherwise the pair is dropped, and the lender is introduced
again.
Owner: one Meeting per rank and pair.
"""

from sglang_live.extensions.lending.channel import Partner
from sglang_live.extensions.lending.table import BORROWERS, LENDERS, LeaseTable

# States of a rank. Of rank 0 alone: BEGUN, and DROPPED: the side does not begin.
UNMET, MET, BEGUN, ENDED, DROPPED = range(5)
# A side whose ranks have not all met by then does not begin: the broker has ended in between, or a
# rank was not there to be told.
MEET_S = 10.0


class Meeting:
    """
    Args:
        side: the own one, LENDERS or BORROWERS.

    Attributes:
        has_begun: on all ranks from the same round on.
        is_over: the side does not begin, and the owner should forget the pair.
    """

    def __init__(self, partner: Partner, table: LeaseTable, side: int, now_s: float):
        self.partner = partner
        self.table = table
        self._side = side
        self._met_s = now_s
        self.has_begun = self.is_over = self._has_ended = False
        table.tell(side, MET)

    def look(self, now_s: float) -> None:
        """To be called once a round: note what this rank sees."""
        if self.partner.has_ended:
            self._end()
        if self.has_begun or self.is_over:
            return
        is_late = now_s - self._met_s > MEET_S
        if self.table.rank == 0:
            if self.any_ended or (is_late and not self.can_begin):
                self.is_over = True
                self.table.tell(self._side, DROPPED)
            return
        if is_late and self._first == UNMET:
            self._end()
        # If rank 0 meets after this, it finds that a rank has ended.
        self.is_over = self._first == DROPPED or (self._has_ended and self._first == UNMET)

    def begin(self) -> None:
        """To be called on all ranks in the same round; on rank 0 when it tells the others."""
        self.has_begun = True
        if self.table.rank == 0:
            self.table.tell(self._side, BEGUN)
            if self._side == BORROWERS:
                self.partner.bell.ring()  # it waits for this

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.table.tell(self._side, ENDED)

    @property
    def _first(self) -> int:
        return self.table.states(self._side)[0]

    # --- for rank 0 ---

    @property
    def can_begin(self) -> bool:
        """Whether all ranks have met, and none has seen the other's end."""
        if self.is_over or any(state != MET for state in self.table.states(self._side)):
            return False
        return self._side == BORROWERS or self.table.states(BORROWERS)[0] == BEGUN

    @property
    def any_ended(self) -> bool:
        """Whether a rank of the other side has ended, or it does not begin."""
        other = BORROWERS if self._side == LENDERS else LENDERS
        return ENDED in self.table.states(self._side) or self.table.states(other)[0] == DROPPED

    @property
    def all_ended(self) -> bool:
        """Whether all ranks of the other side have ended."""
        return all(state == ENDED for state in self.table.states(self._side))
