"""What tells the user's voice in the microphone from other sounds: one class for each kind of them.

In: scores of the microphone's windows. Out: the scores, 0 for what is no voice of the user; how
long the voice must last to be a turn; what was found.
Owner: one object of each class per connection, as the facts that they gather are of one user. Which
of them hear a frame is up to the session's settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.vad import TurnDetection

Scores = npt.NDArray[np.float32]
Pcm = npt.NDArray[np.int16]
TurnCheck = Callable[[Pcm], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """A sound that is no voice of the user, as it is counted and reported: the first of it after a
    while without.

    is_whole: all of the voice that was suspected is this sound.
    """

    what: Literal["echo", "side_talk", "other_voice"]
    reason: Literal["played", "far"]
    is_whole: bool = False


@dataclass(eq=False, kw_only=True)
class Frame:
    """Windows of the microphone that were scored at once.

    buffer: the microphone's audio.
    end: of the windows, as a position in the session's audio, in samples.
    onset: where the voice began of which it is not known yet whether it is a turn; None: not before
        these windows.
    over_response: the user is silent so far, and a voice would interrupt a response.
    is_known: a filter is certain whose voice it is, so that others need not find out.
    found: by the filters.
    """

    buffer: InputBuffer
    end: int
    n_windows: int
    onset: int | None
    detection: TurnDetection
    over_response: bool
    is_known: bool = False
    found: list[Found] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        """The score from which a window is a voice."""
        return self.detection.vad.threshold

    @cached_property
    def pcm(self) -> Pcm:
        """Of the windows; empty if some of it has left the buffer."""
        n = self.n_windows * WINDOW_SAMPLES
        pcm: Pcm = self.buffer.peek(self.end - n, self.end)
        return pcm if len(pcm) == n else pcm[:0]


class VoiceFilter:
    """
    is_undecided: the voice that is heard would be a turn, if it were not too short for the filter.
    """

    is_undecided = False

    def configure(self, detection: TurnDetection) -> bool:
        """Apply the session's settings. Returns whether the filter is on."""
        raise NotImplementedError

    async def filtered(self, frame: Frame, scores: Scores) -> Scores:
        """scores: [n] of the frame's windows, 0 to 1. Returns them, 0 where there is no voice of
        the user."""
        return scores

    def outlast_ms(self, frame: Frame, scores: Scores, so_far_ms: int) -> int:
        """Voice for which a turn must last, if it is more than confirm_ms.

        Called over a response, when a voice is left in the filtered scores.

        so_far_ms: what the filters before this one return.
        """
        return so_far_ms

    def forget(self) -> None:
        """The next voice is a new one."""

    def learn(self, turn: Pcm) -> None:
        """A turn of the user has ended: [n] int16, 16 kHz."""

    def turn_checks(self) -> tuple[TurnCheck, ...]:
        """What a turn that ends now must fulfil to be one of the user. Each takes tens of ms, in
        any thread."""
        return ()

    def close(self) -> None:
        """The session ends."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What filters make of a frame.

    outlast_ms: voice for which a turn must last, if it is more than confirm_ms.
    voice: what the voice so far is, all of which is not the user's; "": it may be a turn.
    """

    scores: Scores
    outlast_ms: int
    voice: str


async def heard(filters: Sequence[VoiceFilter], frame: Frame, scores: Scores) -> Heard:
    """The frame, as filtered by each in turn. scores: of the speech model."""
    for each in filters:
        scores = await each.filtered(frame, scores)
    outlast_ms = 0
    if frame.over_response and (scores >= frame.threshold).any():
        for each in filters:
            outlast_ms = each.outlast_ms(frame, scores, outlast_ms)
    voice = next((found.what for found in frame.found if found.is_whole), "")
    return Heard(scores, outlast_ms, voice)
