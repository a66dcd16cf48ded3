"""The noise that an engine draws codes with, for references that draw with it, too."""

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_live.models.speech_lm.sampler import TABLE_SIZE, GumbelTable, draws_of

# As of engine/frame_lm.py, whose module needs SGLang.
FIRST_CODE_SALT = 0x5DEECE66D
# Of a frame's first draw, and of its second: [n_codes] each.
Noise = Callable[[int, int], tuple[Tensor, Tensor]]


def noise_of(seed: int) -> Noise:
    table = GumbelTable()

    def of(frame: int, n_codes: int) -> tuple[Tensor, Tensor]:
        draw = draws_of(torch.tensor([seed ^ FIRST_CODE_SALT]), torch.tensor([frame]), 1)[:, 0]
        ids = torch.arange(n_codes)[None]
        again = (draw + TABLE_SIZE // 2) & (TABLE_SIZE - 1)
        return table(draw, ids)[0], table(again, ids)[0]

    return of
