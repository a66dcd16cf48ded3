"""What the user's loudspeaker has played, by the server's clock, for the comparison with an echo.

In: audio as the network takes it. Out: the audio that was played until a moment.
Owner: one PlayedAudio per session. Pure given now_s, which never decreases.

As the playback clock without acks does, this assumes that audio plays when it comes, or when what
came before has been played. Where the client is later, the echo's delay is larger by that.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from sglang_live.interaction.echo import MAX_DELAY_S, RATE_HZ, SPAN_S, Floats

# Audio is forgotten when no comparison reads it any more, not even one that is late.
KEPT_S = SPAN_S + MAX_DELAY_S + 0.5
# A response may be sent much faster than it is played.
MOST_BUFFERED_S = 30.0


@dataclass(frozen=True, slots=True)
class _Part:
    start_s: float
    sound: Floats

    @property
    def end_s(self) -> float:
        return self.start_s + len(self.sound) / RATE_HZ


class PlayedAudio:
    def __init__(self) -> None:
        self._parts: deque[_Part] = deque()
        self._end_s = float("-inf")  # of all that came, kept or not

    def add(self, sound: Floats, now_s: float) -> bool:
        """The network took this audio, [n] at RATE_HZ. Returns whether it is kept: not if it plays
        more than MOST_BUFFERED_S from now."""
        part = _Part(max(now_s, self._end_s), sound)
        self._end_s = part.end_s
        is_kept = part.start_s - now_s <= MOST_BUFFERED_S
        if is_kept:
            self._parts.append(part)
        self._forget(now_s)
        return is_kept

    def stop(self, now_s: float) -> None:
        """The client discards what it has not played."""
        while self._parts and self._parts[-1].end_s > now_s:
            part = self._parts.pop()
            n_played = round((now_s - part.start_s) * RATE_HZ)
            if n_played > 0:
                self._parts.append(_Part(part.start_s, part.sound[:n_played]))
                break
        self._end_s = min(self._end_s, now_s)

    def until(self, end_s: float, n: int) -> Floats | None:
        """The n samples that were played until end_s, with zeros where nothing played.

        None: nothing was played in that time.
        """
        begin_s = end_s - n / RATE_HZ
        if self._end_s <= begin_s:
            return None
        found = np.zeros(n, np.float32)
        is_empty = True
        for part in self._parts:
            at = round((part.start_s - begin_s) * RATE_HZ)
            first, last = max(at, 0), min(at + len(part.sound), n)
            if first < last:
                found[first:last] = part.sound[first - at : last - at]
                is_empty = False
        return None if is_empty else found

    def _forget(self, now_s: float) -> None:
        while self._parts and self._parts[0].end_s < now_s - KEPT_S:
            self._parts.popleft()
