"""Per-stream tensors of the talker, indexed by SGLang's request row.

A row outlives neither its request nor a retraction. Everything a stream needs to come back in
another row is kept on the host in `TalkerStream`.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class TalkerStream:
    """Host-side facts of one reply. Written by the scheduler, read by the model.

    prompt_len: positions before the first codec frame.
    audio_rows: [n_audio, thinker_hidden] float32 thinker hidden states, in prompt order.
    audio_at: [n_audio] int64 prompt positions of audio_rows, ascending.
    text_ids: what the decode steps add to their frames, one id per frame.
    text_done: no more text will come; later frames get tts_pad.
    mid_prefill: the running batch holds a chunk of its prefill that is not the last.
    n_frames: frames whose residual codes a launched step has computed.
    sink, n_dropped: of a long reply n_dropped frames behind the first `sink` places have left its
        KV; the token at place p >= sink has position p + n_dropped.
    saved: what a row holds of it, while the stream has none.
    """

    rid: str
    prompt_len: int
    audio_rows: np.ndarray | None
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
        """The frame whose KV lies there, or will."""
        return place - self.prompt_len + self.dropped_before(place)

    def dropped_before(self, place: int) -> int:
        return self.n_dropped if place >= self.sink else 0

    def drop(self, sink: int, n_frames: int) -> None:
        self.sink, self.n_dropped = sink, self.n_dropped + n_frames


@dataclass(frozen=True, slots=True)
class SavedRow:
    """codes: [n_frames, n_residual]; past_hidden: [hidden]; seen: [codec_vocab]."""

    codes: Tensor
    past_hidden: Tensor
    seen: Tensor


class TalkerRows:
    """Device tensors, one row per request slot. Row 0 is SGLang's padding row.

    past_hidden: [n_rows, hidden], normalised hidden state that chose the latest code 0.
    prompt_len:  [n_rows] int64.
    n_dropped:   [n_rows] int64, frames that have left the KV of a long reply.
    text_ids:    [n_rows, max_frames] int32, tts_pad where no text has come.
    codes:       [n_rows, max_frames, n_residual] int16.
    seen:        [n_rows, codec_vocab] bool, codes 0 generated so far.
    penalty:     [n_rows] float32, repetition penalty.
    temperature: [n_rows] float32, of code 0 where not greedy.
    """

    def __init__(
        self,
        *,
        n_rows: int,
        max_frames: int,
        hidden: int,
        n_residual: int,
        codec_vocab: int,
        pad_id: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.max_frames = max_frames
        self._pad_id = pad_id
        self.past_hidden = torch.zeros(n_rows, hidden, device=device, dtype=dtype)
        self.prompt_len = torch.zeros(n_rows, device=device, dtype=torch.int64)
        self.n_dropped = torch.zeros(n_rows, device=device, dtype=torch.int64)
        self.seed = torch.zeros(n_rows, device=device, dtype=torch.int64)
        self.greedy = torch.ones(n_rows, device=device, dtype=torch.bool)
        self.seen = torch.zeros(n_rows, codec_vocab, device=device, dtype=torch.bool)
        self.penalty = torch.ones(n_rows, device=device)
        self.temperature = torch.ones(n_rows, device=device)
        shape = (n_rows, max_frames)
        self.text_ids = torch.full(shape, pad_id, device=device, dtype=torch.int32)
        self.codes = torch.zeros(*shape, n_residual, device=device, dtype=torch.int16)

    def bind(self, stream: TalkerStream, row: int) -> None:
        """Give a stream its row: at first prefill, and again after a retraction."""
        self.prompt_len[row] = stream.prompt_len
        self.n_dropped[row] = stream.n_dropped_written = stream.n_dropped
        self.seed[row] = stream.seed
        self.greedy[row] = stream.greedy
        self.penalty[row] = stream.penalty
        self.temperature[row] = stream.temperature
        self.seen[row] = False
        self.text_ids[row] = self._pad_id
        stream.row, stream.n_text_written = row, 0
        if (saved := stream.saved) is not None:
            self.codes[row, : len(saved.codes)] = saved.codes
            self.past_hidden[row], self.seen[row] = saved.past_hidden, saved.seen
            stream.saved = None
        self.write_text(stream)

    def refresh(self, stream: TalkerStream) -> None:
        """Take over what has changed since the last step."""
        self.write_text(stream)
        if stream.n_dropped != stream.n_dropped_written:
            self.n_dropped[stream.row] = stream.n_dropped_written = stream.n_dropped

    def write_text(self, stream: TalkerStream) -> None:
        """Copy text that came since the last call."""
        known, new = stream.n_text_written, stream.text_ids[stream.n_text_written :]
        if stream.row is None or not new:
            return
        table = self.text_ids
        # From pinned memory: any other copy would wait for what the device is doing.
        ids = torch.tensor(new, dtype=torch.int32, pin_memory=table.is_cuda)
        table[stream.row, known : known + len(new)] = ids.to(table.device, non_blocking=True)
        stream.n_text_written = len(stream.text_ids)

    def unbind(self, stream: TalkerStream) -> None:
        """The row is about to be lost: keep what cannot be recomputed."""
        if stream.row is not None:
            codes = self.codes[stream.row, : stream.n_frames]
            hidden, seen = self.past_hidden[stream.row], self.seen[stream.row]
            stream.saved = SavedRow(codes.clone(), hidden.clone(), seen.clone())
        stream.row = None
