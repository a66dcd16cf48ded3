"""A talker that SGLang serves by itself: one request of a stock language model speaks one piece of
text, and its ids are codes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from sglang_live.errors import StageFailedError
from sglang_live.speakable.style import SpeechStyle


class WrongCodeError(StageFailedError):
    """The model wrote an id that is no code of its place in a frame."""


class FrameReader(Protocol):
    """Makes frames of the ids of one request, as these come."""

    def add(self, ids: list[int]) -> list[list[int]]:
        """The codes of the frames that are complete with these ids.

        Raises:
            WrongCodeError: every code behind it would be misplaced, so the sound would be noise.
        """
        ...


class PieceTalker(ABC):
    """
    Attributes:
        voices: see ModelFacts.
        style: what of a text it can speak.
        steps_per_frame: ids of a frame.
        frame_s: seconds of speech of a frame.
        chunk_frames: frames of which the decoder makes one chunk of audio.
        stop_ids: that end a piece; they are no codes.
        sampling: SGLang's sampling parameters.
    """

    voices: tuple[str, ...]
    style: SpeechStyle
    steps_per_frame: int
    frame_s: float
    chunk_frames: int
    stop_ids: tuple[int, ...]
    sampling: Mapping[str, Any]

    @abstractmethod
    def engine_args(self, cache_dir: Path) -> Mapping[str, Any]:
        """SGLang's server arguments. cache_dir: for files that are derived from the checkpoint."""

    @abstractmethod
    def prompt(self, voice: str, text: str) -> list[int]:
        """Prompt ids of a piece of speech text.

        Raises:
            BadInputError: there is no such voice.
        """

    @abstractmethod
    def frames(self) -> FrameReader: ...
