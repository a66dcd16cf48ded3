"""Words of spoken answers, which later messages name by the id of the answer's audio.

Owner: one SpokenAnswers per process, for all routes that take a chat.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

_KEPT_S = 3600
_MAX_KEPT = 1000


class SpokenAnswers:
    """The oldest are deleted first."""

    def __init__(self, now_s: Callable[[], float] = time.time):
        self._now_s = now_s
        self._texts: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def keep(self, audio_id: str, text: str) -> int:
        """Returns the Unix time at which the words are deleted."""
        until_s = self._now_s() + _KEPT_S
        self._texts[audio_id] = (until_s, text)
        while len(self._texts) > _MAX_KEPT:
            self._texts.popitem(last=False)
        return int(until_s)

    def text(self, audio_id: str) -> str | None:
        """None: there is no such answer, or not any more. Threads may call it."""
        until_s, text = self._texts.get(audio_id, (0.0, ""))
        return text if until_s > self._now_s() else None
