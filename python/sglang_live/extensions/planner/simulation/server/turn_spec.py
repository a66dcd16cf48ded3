"""What is drawn of a turn before the run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpec:
    """
    audio_s: the user's utterance. n_tokens, n_frames: the response.
    """

    audio_s: float
    n_tokens: int
    n_frames: int
