"""A talker's requests as its scheduler and its model know them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class TalkerStream:
    """Host-side record of one talker request. Written by the scheduler, read by the model.

    Attributes:
        prompt_len: positions before the first codec frame.
        audio: thinker hidden states in prompt order; None without audio.
        audio_at: [n_audio] int64 prompt positions of them, ascending.
        text_ids: text that decode steps add to their frames, one id per frame.
        text_done: whether the text is complete; later frames get tts_pad.
        mid_prefill: whether the running batch has a chunk of its prefill that is not the last.
        n_frames: frames whose residual codes a launched step has computed.
        sink: tokens before the frames that compaction dropped.
        n_dropped: dropped frames; the token at index i >= sink has position i + n_dropped.
        saved: contents of its row, while a retracted request has none.
        row: its row; None before the first prefill, and after a retraction.
    """

    rid: str
    prompt_len: int
    audio: "AudioStates | None"
    audio_at: np.ndarray
    seed: int
    greedy: bool
    temperature: float
    penalty: float
    text_ids: list[int] = field(default_factory=list)
    text_done: bool = False
    mid_prefill: bool = False
    n_frames: int = 0
    sink: int = 0
    n_dropped: int = 0
    saved: "SavedRow | None" = None
    row: int | None = None
    n_text_written: int = 0
    n_dropped_written: int = 0

    def has_text_for(self, frame: int) -> bool:
        return self.text_done or frame < len(self.text_ids)

    def frame_at(self, place: int) -> int:
        """The frame whose KV belongs at token index `place`."""
        return place - self.prompt_len + self.dropped_before(place)

    def dropped_before(self, place: int) -> int:
        return self.n_dropped if place >= self.sink else 0

    def drop(self, sink: int, n_frames: int) -> None:
        self.sink, self.n_dropped = sink, self.n_dropped + n_frames


class AudioStates:
    """Thinker states of one prompt, on the host.

    Args:
        parts: [n, thinker_hidden] of each user message with audio, shared by prompts.
    """

    def __init__(self, parts: Sequence[Tensor]):
        self._parts = tuple(parts)
        self.n_rows = sum(len(part) for part in self._parts)

    def between(self, begin: int, end: int) -> Tensor:
        """[end - begin, thinker_hidden]: the rows from begin to end, counted over all parts."""
        found, at = [], 0
        for part in self._parts:
            if at < end and begin < at + len(part):
                found.append(part[max(0, begin - at) : end - at])
            at += len(part)
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True, slots=True)
class SavedRow:
    """Contents of a row: codes [n_frames, n_residual], past_hidden [hidden], seen [codec_vocab]."""

    codes: Tensor
    past_hidden: Tensor
    seen: Tensor
