"""A thinker that speaks itself: its responses have ids of text and, between them, ids of codes.

The codes of a stretch of speech follow the text that they say. In: ids of a growing response. Out:
its text, as far as codes say it, and its codes. Nothing but ids is kept of a response, so that what
was heard of it is a beginning of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import numpy as np

from sglang_live.models.speech import Pcm


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVoice:
    """
    first_id, n_codes: ids of the codes. Each is a frame of one code.
    frame_s: seconds of speech of a frame.
    chunk_frames: of which the decoder makes one chunk of audio.
    frames_per_token: that say a token of text, about.
    """

    first_id: int
    n_codes: int
    frame_s: float
    chunk_frames: int
    frames_per_token: float

    @property
    def chunk_steps(self) -> int:
        """Ids of a chunk of audio: its frames, and the text that they say."""
        return self.chunk_frames + ceil(self.chunk_frames / self.frames_per_token)

    def is_code(self, token_id: int) -> bool:
        return self.first_id <= token_id < self.first_id + self.n_codes


class Ears(Protocol):
    """Speech to ids, for a thinker that hears by them."""

    def move(self, device: str) -> None:
        """To the thinker's device, before they hear; its name is torch's."""
        ...

    def ids(self, pcm: Pcm) -> Sequence[int]:
        """What a user's speech is in the prompt, with the markup around it. Any thread may call it.

        Args:
            pcm: [n] int16, mono, at INPUT_RATE_HZ; of any length.
        Returns:
            Ids of the thinker's vocabulary; none if there is no sound.
        """
        ...


class SpokenIds:
    """The ids of one response, by kind.

    Args:
        text_of: the text of ids without codes.

    Attributes:
        frame_s: see OwnVoice.
        n_text: ids of text so far.
        codes: of all frames so far. spoken: of each the number of ids up to it, and its end in
            seconds of the speech.
    """

    def __init__(self, voice: OwnVoice, text_of: Callable[[list[int]], str]):
        self._voice = voice
        self.frame_s = voice.frame_s
        self._text_of = text_of
        self._text_ids: list[int] = []
        self._n_ids = 0
        self._n_before = 0  # text ids of the stretches before this one
        self._n_frames = 0  # of this stretch
        self._n_told = 0  # frames that were taken
        self._said = 0, ""  # text ids, and their text
        self.codes: list[int] = []
        self.spoken: list[tuple[int, float]] = []

    @property
    def n_text(self) -> int:
        return len(self._text_ids)

    def text(self, ids: Sequence[int], *, ended: bool) -> str:
        """The text of the response so far. Of the newest stretch, what its frames say.

        Args:
            ids: all of them so far.
            ended: no more will come.
        """
        voice = self._voice
        for token_id in ids[self._n_ids :]:
            self._n_ids += 1
            if voice.is_code(token_id):
                self._n_frames += 1
                self.codes.append(token_id - voice.first_id)
                self.spoken.append((self._n_ids, len(self.codes) * self.frame_s))
                continue
            if self._n_frames:
                self._n_before, self._n_frames = self.n_text, 0
            self._text_ids.append(token_id)
        n_said = self._n_before + int(self._n_frames / voice.frames_per_token)
        n_said = self.n_text if ended else min(n_said, self.n_text)
        if n_said > self._said[0]:  # most of the ids are codes
            self._said = n_said, self._text_of(self._text_ids[:n_said])
        return self._said[1]

    def take_frames(self) -> tuple[bytes, list[tuple[int, float]]]:
        """Codes and marks of the frames that were not taken yet, as in messages.TextTokens."""
        begin, self._n_told = self._n_told, len(self.codes)
        return np.array(self.codes[begin:], "<i2").tobytes(), self.spoken[begin:]
