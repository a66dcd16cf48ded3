"""A FrameLM of one code that takes text between its frames (speech_lm/mixing.py), or before them.

What a step does depends on the codes before it and on the text alone, so that a request can be
resumed, and prefilled in chunks, as any other. A row keeps of each frame its code, or a mark, and
the number of text ids taken with it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_live.models.speech_lm.engine.frame_lm import FrameLM
from sglang_live.models.speech_lm.mixing import BEGIN, TEXT, Ratio

_BEFORE_FRAMES, _BETWEEN, _BEHIND = range(3)


@dataclass(frozen=True, slots=True)
class _Past:
    """What steps know of those before them, each [n].

    taken: text ids so far.
    phase: where the text is: before all frames, between them, or complete.
    is_within: whether the next row of a group is next, and nothing is drawn.
    is_full: whether a block is, so that text is next in any case.
    """

    taken: Tensor
    phase: Tensor
    is_within: Tensor
    is_full: Tensor


class MixedLM(FrameLM):
    """
    fill_id: drawn where text is next; SGLang gets it for every step that takes text.
    """

    def __init__(
        self,
        *args: Any,
        ratio: Ratio,
        n_codes: int,
        fill_id: int,
        end_id: int,
        task_id: int,
        again_id: int,
        **kwargs: Any,
    ):
        """
        Args:
            n_codes: first ids, which are codes. The others are marks.
            task_id, again_id: see MixedVoice.
        """
        super().__init__(*args, n_codes=2, **kwargs)
        self.frame_width = 1
        self.fill_id = fill_id
        self._ratio, self._task_id, self._again_id = ratio, task_id, again_id
        self._n_codes = n_codes
        # While the text grows the reference fails at another mark than this, and behind it at
        # another one than the end. Those are not drawn here.
        self.register_buffer("marks", self._bias(end_id), persistent=False)

    def _bias(self, end_id: int) -> Tensor:
        """[3, vocab], by phase."""
        bias = torch.zeros(3, self.config.vocab_size)
        bias[1:, self._n_codes :] = -torch.inf
        bias[_BETWEEN, self.fill_id] = bias[_BEHIND, end_id] = 0.0
        return bias

    # --- inputs ---

    def _embed_places(self, codes: Tensor, rows: Tensor | int, frame: Tensor) -> Tensor:
        code = codes[:, 0]
        text = self._text(rows, codes[:, 1])
        before = self.rows.codes[rows, (frame - 1).clamp(min=0), 0].long()
        # A group that is drawn straight behind another one, as no model is trained to do, has the
        # last of its rows again.
        before = torch.where(before < 0, self._text(rows, codes[:, 1] - 1), before)
        text = torch.where(text == self._again_id, before, text)
        return self._embed_prompt(torch.where(code < 0, text, code))

    def _text(self, rows: Tensor | int, taken: Tensor) -> Tensor:
        """[n] int64, the id that was taken last."""
        wire = self._wire(rows, taken)
        return torch.where(wire < 0, -1 - wire, wire)

    def _wire(self, rows: Tensor | int, taken: Tensor) -> Tensor:
        return self.rows.text_ids[rows, (taken - 1).clamp(min=0)].long()

    # --- draws ---

    def _past(self, rows: Tensor, frame: Tensor) -> _Past:
        n = self._ratio.n_codes
        at = frame.unsqueeze(1) - torch.arange(n, 0, -1, device=frame.device)
        kept = self.rows.codes[rows.unsqueeze(1), at.clamp(min=0)].long()
        begun, block = frame > 0, self.rows.block[rows]
        # Of the prompt's newest block the codes are in front of frame 0.
        is_code = torch.where(at < 0, -at <= block.unsqueeze(1), kept[:, :, 0] >= 0)
        newest = kept[:, -1]
        taken = torch.where(begun, newest[:, 1], 0)
        wire = self._wire(rows, taken)
        is_mixed = block >= 0
        is_complete = is_mixed & (taken > 0) & (wire == -1 - self._task_id)
        phase = torch.where(is_complete, _BEHIND, is_mixed * _BETWEEN)
        is_within = is_mixed & begun & (newest[:, 0] < 0) & (wire >= 0)
        return _Past(taken, phase, is_within, (phase == _BETWEEN) & is_code.all(dim=1))

    def _drawn(self, logits: Tensor, hidden: Tensor, rows: Tensor, frame: Tensor) -> Tensor:
        past = self._past(rows, frame)
        code = super()._drawn(logits + self.marks[past.phase], hidden, rows, frame)[:, 0]
        code = torch.where(past.is_full, self.fill_id, code)
        begins = (past.phase == _BETWEEN) & (code == self.fill_id) & ~past.is_within
        code = torch.where(begins, BEGIN, torch.where(past.is_within, TEXT, code))
        return torch.stack((code, past.taken + (code < 0)), dim=1)

    def _history(self, rows: Tensor, frame: Tensor, window: int) -> Tensor:
        """Of a group's rows only the first counts, as the mark that was drawn."""
        # The last group has two rows more than it has text, of which there is one less.
        kept = super()._history(rows, frame, window * (self._ratio.n_text + 1))
        code = torch.where(kept[:, :, 0] == BEGIN, self.fill_id, kept[:, :, 0])
        counts = code != TEXT
        behind = counts.flip(1).cumsum(dim=1).flip(1)
        place = torch.where(counts & (behind <= window), window - behind, window)
        found = code.new_full((len(code), window + 1), TEXT).scatter_(1, place, code)
        return found[:, :window].unsqueeze(2)

    def _others(self, first: Tensor, hidden: Tensor, greedy: Tensor, draws: Tensor) -> Tensor:
        return first.new_empty(len(first), 0)

    def _completed(self, codes: Tensor, rows: Tensor, frame: Tensor) -> Tensor:
        return codes[:, :1]

    def _ends(self, codes: Tensor) -> Tensor:
        return codes[:, 0] >= self._n_codes

    def _tokens(self, codes: Tensor) -> Tensor:
        return codes[:, 0].masked_fill(codes[:, 0] < 0, self.fill_id)
