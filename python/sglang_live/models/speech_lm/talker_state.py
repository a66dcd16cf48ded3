"""Per-request tensors of the talker, indexed by SGLang's request row.

A request loses its row at its end and at a retraction. What it needs to be resumed in another row
is kept in its `TalkerStream`.
"""

import torch

from sglang_live.models.host_copy import copy_to
from sglang_live.models.speech_lm.streams import SavedRow, TalkerStream


class TalkerRows:
    """Device tensors, one row per request slot. Row 0 is SGLang's padding row.

    past_hidden: [n_rows, hidden], normalised hidden state that chose the latest code 0.
    prompt_len:  [n_rows] int64.
    n_dropped:   [n_rows] int64, frames that compaction has dropped.
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
        """Assign a row at the first prefill, and again after a retraction."""
        # Not by assignment, which copies a number from pageable memory and waits for the device.
        self.prompt_len[row].fill_(stream.prompt_len)
        self.n_dropped[row].fill_(stream.n_dropped)
        self.seed[row].fill_(stream.seed)
        self.greedy[row].fill_(stream.greedy)
        self.penalty[row].fill_(stream.penalty)
        self.temperature[row].fill_(stream.temperature)
        self.seen[row].fill_(False)
        self.text_ids[row].fill_(self._pad_id)
        stream.n_dropped_written = stream.n_dropped
        stream.row, stream.n_text_written = row, 0
        if (saved := stream.saved) is not None:
            self.codes[row, : len(saved.codes)] = saved.codes
            self.past_hidden[row], self.seen[row] = saved.past_hidden, saved.seen
            stream.saved = None
        self.write_text_ids(stream)

    def refresh(self, stream: TalkerStream) -> None:
        """Write the changes since the last step."""
        self.write_text_ids(stream)
        if stream.n_dropped != stream.n_dropped_written:
            self.n_dropped[stream.row].fill_(stream.n_dropped)
            stream.n_dropped_written = stream.n_dropped

    def write_text_ids(self, stream: TalkerStream) -> None:
        """Copy text that came since the last call."""
        known, new = stream.n_text_written, stream.text_ids[stream.n_text_written :]
        if stream.row is None or not new:
            return
        table = self.text_ids
        ids = copy_to(torch.tensor(new, dtype=torch.int32), table.device)
        table[stream.row, known : known + len(new)] = ids
        stream.n_text_written = len(stream.text_ids)

    def unbind(self, stream: TalkerStream) -> None:
        """Save what cannot be recomputed, before a retraction takes the row."""
        if stream.row is not None:
            codes = self.codes[stream.row, : stream.n_frames]
            hidden, seen = self.past_hidden[stream.row], self.seen[stream.row]
            stream.saved = SavedRow(codes.clone(), hidden.clone(), seen.clone())
        stream.row = None
