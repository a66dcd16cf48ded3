"""Number of codec frames that the talker has generated, from the server's /metrics."""

import time
from collections.abc import Callable

from benchmark.load.stage_load import PING_S, stage_loads


def talker_frames(metrics: str) -> int | None:
    """Sum over the talker's replicas. None if the server has no such metric."""
    frames = stage_loads(metrics).get("talker", {}).get("frames")
    return None if frames is None else round(frames)


class FrameCount:
    """Frames generated between `begin` and `end`.

    read: returns the text of /metrics.
    """

    def __init__(self, read: Callable[[], str], sleep: Callable[[float], None] = time.sleep):
        self._read = read
        self._sleep = sleep
        self._before: int | None = None

    def begin(self) -> None:
        self._before = talker_frames(self._read())
        if self._before is None:
            # The first ping may not have arrived yet.
            self._sleep(PING_S)
            self._before = talker_frames(self._read())

    def end(self) -> int | None:
        if self._before is None:
            return None
        # The gauge is as old as the last ping.
        self._sleep(PING_S)
        after = talker_frames(self._read())
        # A restarted stage counts from zero: the difference would be meaningless.
        return None if after is None or after < self._before else after - self._before
