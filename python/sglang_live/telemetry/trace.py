"""Where a turn's time went: named marks on one clock."""

from sglang_live.clock import Clock


class TurnTrace:
    """Seconds since the turn began; the first time each mark was reached."""

    def __init__(self, clock: Clock):
        self._clock, self._began_s = clock, clock.now_s()
        self.marks: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.marks.setdefault(name, self._clock.now_s() - self._began_s)
