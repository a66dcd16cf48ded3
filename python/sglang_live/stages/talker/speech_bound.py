"""How long the talker may speak for the text that it was given.

A talker that misses its end would go on for as long as its rows have room: 22 minutes.
Owner: one SpeechBound per reply.
"""

from dataclasses import dataclass

# Four to six frames a token are usual (0.32 to 0.48 s), and a short reply has pauses of its own:
# recordings of single cards take up to 0.52 s a token.
FRAMES_PER_TOKEN = 12
SPARE_FRAMES = 50


@dataclass(slots=True)
class SpeechBound:
    """
    n_ids: text tokens so far. is_complete: no more will come.
    most: frames for which the engine has room.
    """

    most: int
    n_ids: int = 1  # the one with which a reply begins
    is_complete: bool = False

    @property
    def max_frames(self) -> int:
        """While text may come, only the room: the talker waits for text by itself."""
        if not self.is_complete:
            return self.most
        return min(self.most, SPARE_FRAMES + FRAMES_PER_TOKEN * self.n_ids)
