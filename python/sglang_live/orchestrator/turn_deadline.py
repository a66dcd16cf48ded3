"""A turn's deadlines, as admission counts them: of its first audio and gaps, or of its frame."""

from collections.abc import Callable

from sglang_live.capacity.control import CapacityControl
from sglang_live.core import TurnRequest


class TurnDeadline:
    """
    Args:
        turn: None: there is none yet, and nothing is counted. Of a speculative turn nothing is
            counted before confirm(): the user's wait has not begun.
    """

    def __init__(self, capacity: CapacityControl, session_id: str, turn: TurnRequest | None):
        self._capacity, self._session_id, self._turn = capacity, session_id, turn
        self._due: int | None = None
        self._had_audio, self._gap_s = False, 0.0
        self._unconfirmed: list[Callable[[], None]] | None = None
        if turn is not None and turn.speculative:
            self._unconfirmed = []
        else:
            self._begin()

    def _begin(self) -> None:
        turn, capacity = self._turn, self._capacity
        if turn is not None:
            capacity.turn_begins(self._session_id)
        if turn is not None and turn.frame_s is not None:
            self._due = capacity.frame_due(self._session_id, turn.frame_s)
        elif turn is not None and turn.wants_audio and not turn.flex:
            may_be_silent = bool(turn.tools.functions)  # a response may consist of function calls
            must_come = not may_be_silent
            self._due = capacity.first_packet_due(self._session_id, must_come=must_come)

    def confirm(self) -> None:
        """The speculative turn has become the response, to a user who waits from now on."""
        happened, self._unconfirmed = self._unconfirmed, None
        if happened is not None:
            self._begin()
            for event in happened:
                event()

    def audio_came(self) -> None:
        if self._unconfirmed is not None:
            if not self._unconfirmed:
                self._unconfirmed.append(self.audio_came)
        elif self._due is not None:
            self._capacity.came(self._due)
            self._due, self._had_audio = None, True

    def frame_done(self) -> None:
        if self._due is not None:
            self._capacity.came(self._due)
            self._due = None

    def gap(self, silent_s: float) -> None:
        self._gap_s = max(self._gap_s, silent_s)

    def withdrawn(self) -> None:
        if self._due is not None:
            self._capacity.gone(self._due)
            self._due = None

    def failed(self) -> None:
        if self._unconfirmed is not None:
            self._unconfirmed.append(self.failed)
        elif self._due is not None:
            self._capacity.failed(self._due)
            self._due = None

    def over(self) -> None:
        if self._unconfirmed is not None:
            self._unconfirmed.append(self.over)
            return
        self.withdrawn()
        if self._had_audio:
            self._had_audio = False
            self._capacity.flowed(self._session_id, self._gap_s)
