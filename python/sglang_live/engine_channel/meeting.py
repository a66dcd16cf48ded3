"""One rank's part in a pair of engines, until all ranks have begun, and when the other side ends.

The broker introduces rank r of one engine to rank r of the other. Ranks hear of it at different
times, and notice the other's end at different times. Each writes what it has seen into the pair's
table (lease_table.py), where rank 0 of its side reads it: the pair begins when all ranks have met,
and rank 0 tells that to the others, so that all begin in the same round.
Owner: one Meeting per rank and pair.
"""

from sglang_live.engine_channel.lease_channel import Partner
from sglang_live.engine_channel.lease_table import LeaseTable

# States of a rank. DROPPED, of rank 0 alone: the pair does not begin.
UNMET, MET, ENDED, DROPPED = range(4)
# A pair whose ranks have not all met by then does not begin: the broker has ended in between, or a
# rank was not there to be told.
MEET_S = 10.0


class Meeting:
    """
    Args:
        side: the own one, LENDERS or BORROWERS.

    Attributes:
        has_begun: set by the owner, on all ranks in the same round.
        is_over: the pair does not begin, and its owner should forget it.
    """

    def __init__(self, partner: Partner, table: LeaseTable, side: int, now_s: float):
        self.partner, self.table, self._side, self._met_s = partner, table, side, now_s
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
            states = self.table.states(self._side)
            if ENDED in states or (is_late and not self.can_begin):
                self.is_over = True
                self.table.tell(self._side, DROPPED)
            return
        if is_late and self._first == UNMET:
            self._end()
        # If rank 0 meets after this, it finds that a rank has ended.
        self.is_over = self._first == DROPPED or (self._has_ended and self._first == UNMET)

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
        return not self.is_over and all(state == MET for state in self.table.states(self._side))

    @property
    def any_ended(self) -> bool:
        """Whether a rank of the other side has ended."""
        return ENDED in self.table.states(self._side)

    @property
    def all_ended(self) -> bool:
        return all(state == ENDED for state in self.table.states(self._side))
