"""Number of codec frames that the talker has generated, from the server's /metrics."""

import re
import time
from collections.abc import Callable

# Stages report their load every two seconds.
PING_S = 2.5

_SERIES = re.compile(r"^sglang_live_stage_load\{([^}]*)\} (\S+)$", re.MULTILINE)


def talker_frames(metrics: str) -> int | None:
    """Sum over the talker's replicas. None if the server has no such metric."""
    values = [
        float(value)
        for labels, value in _SERIES.findall(metrics)
        if 'stage="talker"' in labels and 'what="frames"' in labels
    ]
    return round(sum(values)) if values else None


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
