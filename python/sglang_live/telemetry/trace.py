"""Named marks in the time of one turn, and what each stage takes of it."""

from collections import deque
from collections.abc import Mapping

from sglang_live.clock import Clock

# By stage, the mark at which its part of the time to the first audio ends.
_ENDS = {
    "thinker": "thinker_first_token",
    "talker": "talker_first_frame",
    "vocoder": "first_audio",
}
_LATEST = 100


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


class StageSpans:
    """What each stage took of the time to the first audio, in the latest turns."""

    def __init__(self) -> None:
        self._spans_s: dict[str, deque[float]] = {}

    def add(self, marks: Mapping[str, float]) -> None:
        """Of one turn."""
        since_s = 0.0
        for stage, mark in _ENDS.items():
            if (at_s := marks.get(mark)) is not None:
                spans_s = self._spans_s.setdefault(stage, deque(maxlen=_LATEST))
                spans_s.append(max(0.0, at_s - since_s))
                since_s = at_s

    def p90_s(self) -> dict[str, float]:
        """By stage; of stages without a turn there is none."""
        return {
            stage: sorted(spans_s)[(9 * len(spans_s) - 1) // 10]
            for stage, spans_s in self._spans_s.items()
        }
