"""A talker's requests as its scheduler and its model know them.

TalkerRows are per-request tensors, indexed by SGLang's request row.

A request loses its row at its end and at a retraction. What it needs to be resumed in another row
is kept in its `TalkerStream`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_live.messages import Picture
from sglang_live.models.host_copy import copy_to


@dataclass(slots=True)
class TalkerStream:
    """Host-side record of one talker request. Written by the scheduler, read by the model.

    Attributes:
        prompt_len: positions before the first codec frame.
        audio: thinker hidden states in prompt order; None without audio and pictures.
        audio_at: [n_audio] int64 prompt positions of them, ascending.
        pictures: in the prompt (see messages.py: Picture), ascending.
        text_ids: text that decode steps add to their frames, one id per frame; or the codes of the
            user's frames, for a model that hears while it speaks.
        n_text_gone: entries that text_ids has dropped at its front, because a row has them.
        text_done: whether the text is complete; later frames get tts_pad.
        block: see TalkerPrompt.
        mid_prefill: whether the running batch has a chunk of its prefill that is not the last.
        least_frames: before which it does not end.
        n_frames: frames whose codes a launched step has computed.
        sink: tokens before the frames that compaction dropped.
        n_dropped: dropped frames; the token at index i >= sink has position i + n_dropped.
        saved: contents of its row, while a retracted request has none.
        begun: codes [n_frames, n_codes] int16 of the frames that another engine has made, until
            they are in the row.
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
    text_ids: list[Any] = field(default_factory=list)
    n_text_gone: int = 0
    text_done: bool = False
    mid_prefill: bool = False
    least_frames: int = 0
    n_frames: int = 0
    sink: int = 0
    n_dropped: int = 0
    saved: "SavedRow | None" = None
    begun: Tensor | None = None
    pictures: tuple[Picture, ...] = ()
    block: int = -1
    row: int | None = None
    n_text_written: int = 0
    n_dropped_written: int = 0

    def audio_in(self, begin: int, end: int) -> tuple[Tensor, Tensor] | None:
        """The states of [begin, end) of the prompt, and their places behind begin [n] int64; on the
        host. None: there are none."""
        if self.audio is None:
            return None
        first, last = self.audio_at.searchsorted((begin, end))
        if first == last:
            return None
        places = torch.from_numpy(self.audio_at[first:last] - begin)
        return self.audio.between(first, last), places

    @property
    def n_text(self) -> int:
        return self.n_text_gone + len(self.text_ids)

    def has_text_for(self, frame: int) -> bool:
        return self.text_done or frame < self.n_text

    def frame_at(self, place: int) -> int:
        """The frame whose KV belongs at token index `place`."""
        return place - self.prompt_len + self.dropped_before(place)

    def dropped_before(self, place: int) -> int:
        return self.n_dropped if place >= self.sink else 0

    @property
    def shift(self) -> int:
        """Position minus index of all that is behind the pictures."""
        return sum(seen.n_positions - seen.n_tokens for seen in self.pictures)

    def shifts(self, begin: int, end: int) -> Tensor:
        """[3, end - begin]: positions in time, height and width minus index."""
        shifts = np.zeros((3, end), np.int64)
        for seen in self.pictures:
            at, n = seen.at, seen.n_tokens
            if at >= end:
                break
            index = np.arange(n)
            layer, row, column = np.unravel_index(index, (seen.layers, seen.rows, seen.columns))
            grid = np.stack([layer * seen.step, row, column]) - index
            shifts[:, at : at + n] += grid[:, : end - at]
            shifts[:, at + n :] += seen.n_positions - n
        return torch.from_numpy(shifts[:, begin:])

    def drop(self, sink: int, n_frames: int) -> None:
        self.sink = sink
        self.n_dropped = self.n_dropped + n_frames


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
    """Contents of a row: codes [n_frames, n_codes], past_hidden [hidden], seen [codec_vocab]."""

    codes: Tensor
    past_hidden: Tensor
    seen: Tensor


class TalkerRows:
    """Device tensors, one row per request slot. Row 0 is SGLang's padding row.

    is_ring: a request may have more than max_frames frames; frame n is at n % max_frames, and the
        newest ones are kept.

    past_hidden: [n_rows, hidden], normalised hidden state that chose the latest code 0.
    prompt_len:  [n_rows] int64.
    n_dropped:   [n_rows] int64, frames that compaction has dropped.
    shift:       [n_rows] int64, see TalkerStream.
    text_ids:    [n_rows, max_frames] int32, tts_pad where no text has come; or [..., n_heard], the
                 codes of the user's frames.
    codes:       [n_rows, max_frames, n_codes] int16, those of a frame that its id does not tell,
                 or all of them (engine/frame_lm.py).
    seen:        [n_rows, codec_vocab] bool, codes 0 generated so far.
    penalty:     [n_rows] float32, repetition penalty.
    temperature: [n_rows] float32, of code 0 where not greedy.
    least:       [n_rows] int64, frames before which a request does not end.
    block:       [n_rows] int64, see TalkerPrompt.
    """

    def __init__(
        self,
        *,
        n_rows: int,
        max_frames: int,
        hidden: int,
        n_codes: int,
        codec_vocab: int,
        pad_id: int,
        device: torch.device,
        dtype: torch.dtype,
        n_heard: int = 0,
        is_ring: bool = False,
    ):
        self.max_frames = max_frames
        self.is_ring = is_ring
        self._pad_id = pad_id
        self.past_hidden = torch.zeros(n_rows, hidden, device=device, dtype=dtype)
        self.prompt_len = torch.zeros(n_rows, device=device, dtype=torch.int64)
        self.n_dropped = torch.zeros(n_rows, device=device, dtype=torch.int64)
        self.shift = torch.zeros(n_rows, device=device, dtype=torch.int64)
        self.seed = torch.zeros(n_rows, device=device, dtype=torch.int64)
        self.greedy = torch.ones(n_rows, device=device, dtype=torch.bool)
        self.seen = torch.zeros(n_rows, codec_vocab, device=device, dtype=torch.bool)
        self.penalty = torch.ones(n_rows, device=device)
        self.temperature = torch.ones(n_rows, device=device)
        self.least = torch.zeros(n_rows, device=device, dtype=torch.int64)
        self.block = torch.full((n_rows,), -1, device=device, dtype=torch.int64)
        shape = (n_rows, max_frames)
        text_shape = (*shape, n_heard) if n_heard else shape
        self.text_ids = torch.full(text_shape, pad_id, device=device, dtype=torch.int32)
        self.codes = torch.zeros(*shape, n_codes, device=device, dtype=torch.int16)

    def bind(self, stream: TalkerStream, row: int) -> None:
        """Assign a row at the first prefill, and again after a retraction."""
        # Not by assignment, which copies a number from pageable memory and waits for the device.
        self.prompt_len[row].fill_(stream.prompt_len)
        self.n_dropped[row].fill_(stream.n_dropped)
        self.shift[row].fill_(stream.shift)
        self.seed[row].fill_(stream.seed)
        self.greedy[row].fill_(stream.greedy)
        self.penalty[row].fill_(stream.penalty)
        self.temperature[row].fill_(stream.temperature)
        self.least[row].fill_(stream.least_frames)
        self.block[row].fill_(stream.block)
        self.seen[row].fill_(False)
        self.text_ids[row].fill_(self._pad_id)
        stream.n_dropped_written = stream.n_dropped
        stream.row = row
        stream.n_text_written = stream.n_text_gone
        if (saved := stream.saved) is not None:
            self.codes[row, : len(saved.codes)] = saved.codes
            self.past_hidden[row], self.seen[row] = saved.past_hidden, saved.seen
            stream.saved = None
        if (begun := stream.begun) is not None:
            # What else a row holds follows from the prefill of these frames.
            self.codes[row, : len(begun)] = copy_to(begun[:, 1:].contiguous(), self.codes.device)
            stream.begun = None
        self.write_text_ids(stream)

    def refresh(self, stream: TalkerStream) -> None:
        """Write the changes since the last step."""
        self.write_text_ids(stream)
        if stream.n_dropped != stream.n_dropped_written:
            self.n_dropped[stream.row].fill_(stream.n_dropped)
            stream.n_dropped_written = stream.n_dropped

    def write_text_ids(self, stream: TalkerStream) -> None:
        """Copy text that came since the last call."""
        known = stream.n_text_written
        new = stream.text_ids[known - stream.n_text_gone :]
        if stream.row is None or not new:
            return
        if self.is_ring and len(new) > self.max_frames:
            known, new = known + len(new) - self.max_frames, new[-self.max_frames :]
        table = self.text_ids
        ids = copy_to(torch.tensor(new, dtype=torch.int32), table.device)
        at = known % self.max_frames
        n_whole = self.max_frames - at  # up to the ring's end
        table[stream.row, at : at + len(new)] = ids[:n_whole]
        if len(new) > n_whole:
            table[stream.row, : len(new) - n_whole] = ids[n_whole:]
        stream.n_text_written = stream.n_text
        if self.is_ring and len(stream.text_ids) > 2 * self.max_frames:
            n_gone = len(stream.text_ids) - self.max_frames
            del stream.text_ids[:n_gone]
            stream.n_text_gone += n_gone

    def unbind(self, stream: TalkerStream) -> None:
        """Save what cannot be recomputed, before a retraction takes the row."""
        if stream.row is not None:
            codes = self.codes[stream.row, : stream.n_frames]
            hidden, seen = self.past_hidden[stream.row], self.seen[stream.row]
            stream.saved = SavedRow(codes.clone(), hidden.clone(), seen.clone())
        stream.row = None
