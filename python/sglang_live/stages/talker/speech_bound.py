"""Bound on the speech for a text.

A talker that misses its end would go on for as long as its rows have room: 22 minutes.
Owner: one SpeechBound per response.
"""

from dataclasses import dataclass

# Four to six frames per token are usual (0.32 to 0.48 s). Pauses add to that in short responses:
# recordings of single cards take up to 0.52 s per token.
FRAMES_PER_TOKEN = 12
SPARE_FRAMES = 50


@dataclass(slots=True)
class SpeechBound:
    """
    most: frames for which the engine has room.
    n_ids: text tokens so far.
    is_complete: whether the text is complete.
    """

    most: int
    n_ids: int = 1  # the one with which a response begins
    is_complete: bool = False

    @property
    def n_read(self) -> int:
        """Text tokens so far, without the end."""
        return self.n_ids - self.is_complete

    @property
    def max_frames(self) -> int:
        """Until the text is complete, only the room: the talker waits for text by itself."""
        if not self.is_complete:
            return self.most
        return min(self.most, SPARE_FRAMES + FRAMES_PER_TOKEN * self.n_ids)
