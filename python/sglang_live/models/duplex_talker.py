"""A talker that hears the user while it speaks: one request of its engine is a whole call."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class DuplexTalker(ABC):
    """Every step takes a frame of the user, and draws one: its text token, then its codes.

    Attributes:
        external_models: package with the model's class.
        frame_s: seconds of a frame, of the user's sound and of its own.
        n_codes: of a frame of its own, without the text token.
        n_heard: of a frame of the user.
        delays: frames by which each of its own codes comes later than its sound; 0 or 1.
        context_frames: of which it knows the meaning, behind its prompt.
        temperature: of the text token, by default.
        voices: see ModelFacts.
    """

    external_models: str
    frame_s: float
    n_codes: int
    n_heard: int
    delays: Sequence[int]
    context_frames: int
    temperature: float
    voices: tuple[str, ...]

    @abstractmethod
    def engine_args(self, cache_dir: Path, n_rows: int, n_frames: int) -> dict[str, Any]:
        """SGLang's server arguments.

        Args:
            cache_dir: for files that are derived from the checkpoint.
            n_rows: request rows, for which the model keeps tensors of its own.
            n_frames: newest frames of a call that a row keeps.
        """

    @abstractmethod
    def prompt(self, voice: str, role: str) -> list[int]:
        """Prompt ids of a call.

        Args:
            role: who it is, in words; "": as it was trained.
        Raises:
            BadInputError: there is no such voice, or it takes no role.
        """

    @abstractmethod
    def text(self, token: int) -> str:
        """What a text token adds to the transcript."""
