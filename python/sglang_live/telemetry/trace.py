"""Named marks in the time of one turn."""

from sglang_live.clock import Clock


class TurnTrace:
    """Times of a turn's marks.

    marks: seconds from the start of the turn to the first time that each mark was reached.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._began_s = clock.now_s()
        self.marks: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.marks.setdefault(name, self._clock.now_s() - self._began_s)
