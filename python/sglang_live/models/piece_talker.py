"""A talker that speaks a response piece by piece: one request of its engine speaks one piece."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sglang_live.errors import StageFailedError
from sglang_live.models.family import VoiceMaker
from sglang_live.models.speech_lm.mixing import MixedVoice
from sglang_live.speakable.style import SpeechStyle

# Source: llm_job of FunAudioLLM/CosyVoice (cli/model.py).
MOST_SILENT = 5


class PieceTalker(ABC):
    """
    Attributes:
        voices: see ModelFacts.
        style: what of a text it can speak.
        codes_per_frame: as the decoder takes them.
        steps_per_frame: of the engine.
        frame_s: seconds of speech of a frame.
        chunk_frames: frames of which the decoder makes one chunk of audio.
        ahead_frames: behind them, without which the decoder has no sound of them.
        silent_codes: first codes of frames that are silent. No more than MOST_SILENT of these in a
            row reach the decoder: a model that was trained so may be silent for long.
        lag_steps: the first steps of a piece, with which no frame is complete.
        decode_s: for which a decoder without graphs takes longer for a chunk than others do.
    """

    voices: tuple[str, ...]
    style: SpeechStyle
    codes_per_frame: int
    steps_per_frame: int
    frame_s: float
    chunk_frames: int
    ahead_frames = lag_steps = 0
    decode_s = 0.0
    silent_codes: frozenset[int] = frozenset()

    @property
    def chunk_steps(self) -> int:
        """Of which nothing may be sound yet; the engine counts all of its steps as speech."""
        n_frames = self.chunk_frames + self.ahead_frames
        return self.steps_per_frame * n_frames + self.lag_steps

    @abstractmethod
    def prompt(self, voice: str, text: str) -> list[int]:
        """Prompt ids of a piece of speech text.

        Raises:
            BadInputError: there is no such voice.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PiecePrompt:
    """What the engine reads before the first frame of a piece.

    Attributes:
        rows: [n, hidden] float32, the embeddings of the first n ids, which the model has in no
            table (FrameTalker); None: its ids are all.
    """

    ids: list[int]
    rows: np.ndarray | None = None


@runtime_checkable
class BroughtVoices(VoiceMaker, Protocol):
    """A PieceTalker that takes on voices while it serves."""

    def prompt_in(self, speaker: np.ndarray, text: str) -> PiecePrompt:
        """PieceTalker.prompt in a voice that make_voice made. speaker: flat.

        Raises:
            BadInputError: another model made it.
        """
        ...


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


class StockTalker(PieceTalker):
    """SGLang serves it by itself: a stock language model, whose ids are codes.

    Attributes:
        stop_ids: that end a piece; they are no codes.
        sampling: SGLang's sampling parameters.
    """

    stop_ids: tuple[int, ...]
    sampling: Mapping[str, Any]

    @abstractmethod
    def engine_args(self, cache_dir: Path) -> Mapping[str, Any]:
        """SGLang's server arguments. cache_dir: for files that are derived from the checkpoint."""

    @abstractmethod
    def frames(self) -> FrameReader: ...


class FrameTalker(PieceTalker):
    """A class of the family's own draws a whole frame in every step (speech_lm/engine/frame_lm.py).

    Attributes:
        external_models: package with that class.
        end_id: that ends a piece; it comes without a frame.
        temperature, repetition_penalty: of the model's own sampling, by default.
    """

    steps_per_frame = 1
    external_models: str
    end_id: int
    temperature: float
    repetition_penalty: float

    def least_frames(self, text: str) -> int:
        """Of a piece, before which it does not end."""
        return 0

    def mixed_voice(self, voice: str) -> MixedVoice | None:
        """How the voice speaks a text that grows meanwhile; None: it needs the whole piece.

        Raises:
            BadInputError: there is no such voice.
        """
        return None

    def words(self, text: str) -> list[int]:
        """Prompt ids of a part of such a text."""
        raise NotImplementedError

    @abstractmethod
    def engine_args(self, cache_dir: Path, n_rows: int) -> Mapping[str, Any]:
        """SGLang's server arguments.

        Args:
            cache_dir: for files that are derived from the checkpoint.
            n_rows: request rows, for which the model keeps tensors of its own.
        """
