"""When the vocoder makes a response's next chunk, and of how many frames.

A chunk of more frames costs less for each of them, one of fewer exists sooner. So chunks are small
while the listener has little left to hear, and grow with what has gathered: a vocoder that falls
behind makes larger ones.
"""

import math
from dataclasses import dataclass

# A listener with less left gets small chunks: the time that a chunk of normal size takes to gather
# while its talker keeps pace. Most gaps were at the first chunk of normal size.
SHORT_BELOW_S = 0.3
# From the begin of a chunk's decoding to its sound.
LEAD_S = 0.1


@dataclass(slots=True)
class Ahead:
    """How far a response's sound is ahead of a listener who hears it as it comes.

    runs_out_s: until when what was made lasts.
    """

    runs_out_s: float = -math.inf

    @property
    def has_sound(self) -> bool:
        return self.runs_out_s > -math.inf

    def made(self, now_s: float, audio_s: float) -> None:
        self.runs_out_s = max(self.runs_out_s, now_s) + audio_s

    def is_short(self, now_s: float) -> bool:
        return self.runs_out_s - now_s < SHORT_BELOW_S

    def due_s(self, ready_s: float) -> float:
        """Time by which the next chunk should begin. ready_s: when its frames were there."""
        return max(self.runs_out_s - LEAD_S, ready_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRule:
    """The chunks in which a stream is decoded, if its sound depends on them: neither load nor
    listener change them.

    first: frames of the first one, with those that the decoder looks ahead.
    second, growth, step, most: frames of the second; each later one has `growth` times as many as
        the one before it, or `step` more, and at most `most`.
    """

    first: int
    second: int
    growth: int = 1
    step: int = 0
    most: int

    def frames(self, n_chunks: int) -> int:
        """Of the chunk behind n_chunks, unless the stream ends before it."""
        if not n_chunks:
            return self.first
        grown: int = self.second * self.growth ** (n_chunks - 1)
        return min(grown + self.step * (n_chunks - 1), self.most)


def chunk_frames(n_pending: int, small: int, large: int, *, is_first: bool, ends: bool) -> int:
    """Frames of the next chunk.

    Args:
        n_pending: frames that have not been decoded.
        is_first: nothing of the response has been heard.
        ends: no frame follows them.
    """
    takes_all = not is_first and (ends or n_pending >= large)
    return min(large if takes_all else small, n_pending)
