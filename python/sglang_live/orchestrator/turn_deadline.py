"""A turn's deadlines, as admission counts them: of its first audio and gaps, its frame or text."""

from collections.abc import Callable

from sglang_live.capacity.control import CapacityControl
from sglang_live.core import TurnRequest


class TurnDeadline:
    """
    Args:
        turn: if it is speculative, nothing is counted before confirm(): the user's wait has not
            begun.
    """

    def __init__(self, capacity: CapacityControl, session_id: str, turn: TurnRequest):
        self._capacity = capacity
        self._session_id = session_id
        self._turn = turn
        self._due: int | None = None
        self._had_text = False
        self._had_audio = False
        self._gap_s = 0.0
        self._unconfirmed: list[Callable[[], None]] | None = None
        if turn.speculative:
            self._unconfirmed = []
        else:
            self._begin()

    def _begin(self) -> None:
        turn, capacity = self._turn, self._capacity
        capacity.turn_begins(self._session_id)
        if turn.frame_s is not None:
            self._due = capacity.frame_due(self._session_id, turn.frame_s)
        elif turn.flex or turn.transcribes:
            pass  # no user waits, or for as long as the recording lasts
        elif turn.wants_audio:
            self._due = capacity.first_packet_due(self._session_id)
        else:
            self._due = capacity.first_token_due(self._session_id)

    def confirm(self) -> None:
        """The speculative turn has become the response, to a user who waits from now on."""
        happened, self._unconfirmed = self._unconfirmed, None
        if happened is not None:
            self._begin()
            for event in happened:
                event()

    def text_came(self) -> None:
        """Text of the response has come. If it is to be heard, its sound is still due."""
        if self._waits(self.text_came) or self._had_text:
            return
        self._had_text = True
        if not self._turn.is_timely:
            self._end(self._capacity.came)

    def call_came(self) -> None:
        """A function call of the response has begun. Nothing behind it is heard."""
        if not self._waits(self.call_came) and not self._had_text:
            self.text_came()
            self.done()

    def audio_came(self) -> None:
        if not self._waits(self.audio_came) and self._end(self._capacity.came):
            self._had_audio = True

    def done(self) -> None:
        """The response is complete: what has not come will not."""
        if not self._waits(self.done):
            self._end(self._capacity.gone)

    def frame_done(self) -> None:
        self._end(self._capacity.came)

    def gap(self, silent_s: float) -> None:
        self._gap_s = max(self._gap_s, silent_s)

    def withdrawn(self) -> None:
        """The user does not wait for the response any more."""
        self._end(self._capacity.abandoned)

    def failed(self) -> None:
        if not self._waits(self.failed):
            self._end(self._capacity.failed)

    def over(self) -> None:
        if self._waits(self.over):
            return
        self.withdrawn()
        if self._had_audio:
            self._had_audio = False
            self._capacity.flowed(self._session_id, self._gap_s)

    def _waits(self, event: Callable[[], None]) -> bool:
        """Note an event of a turn that is not confirmed. Returns False of any other turn."""
        if self._unconfirmed is None:
            return False
        if event not in self._unconfirmed:
            self._unconfirmed.append(event)
        return True

    def _end(self, how: Callable[[int], None]) -> bool:
        """Returns False if there is no deadline, or it has ended."""
        if self._due is None:
            return False
        how(self._due)
        self._due = None
        return True
