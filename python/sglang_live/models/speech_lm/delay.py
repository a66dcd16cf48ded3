"""Codes of several books, written one step apart: book q writes its code of frame f in step f + q.

Before a book's first code is a mark, and behind its last one another. What the next step has to
have, and the frame that it completes, follow from the newest steps alone, so that a request that is
retracted needs nothing else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_live.models.speech_lm.sampler import NO_CODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """
    Attributes:
        n_codes: of a book; ids from here on are marks.
        begin_id: in a book's place until its first code.
        end_id: behind its last code. The first one, of any book, begins the end of the stream.
    """

    n_books: int
    n_codes: int
    begin_id: int
    end_id: int

    def n_ending(self, history: Tensor) -> Tensor:
        """[n] int64, steps since the end began, with the one that began it.

        history: [n, >= n_books, n_books] int64, the newest steps, the last one behind; NO_CODE
            before the first.
        """
        newest = history[:, -self.n_books :]
        return (newest == self.end_id).any(dim=2).sum(dim=1)

    def forced(self, step: Tensor, history: Tensor) -> Tensor:
        """[n, n_books] int64, the marks that a step has to have; NO_CODE: any code is possible.

        Args:
            step: [n] int64, number of the step.
            history: see n_ending.
        """
        book = torch.arange(self.n_books, device=step.device)
        ended = book < self.n_ending(history).unsqueeze(1)
        marks = torch.where(book > step.unsqueeze(1), self.begin_id, NO_CODE)
        return torch.where(ended, self.end_id, marks)

    def completed(self, step: Tensor, history: Tensor, codes: Tensor) -> Tensor:
        """[n, n_books] int64, the frames that are complete with a step; NO_CODE: none is yet.

        A mark that a model has written in the place of a code becomes the nearest code.

        Args:
            step, history: before the step.
            codes: [n, n_books] int64, of the step.
        """
        newest = torch.cat((history, codes.unsqueeze(1)), dim=1)[:, -self.n_books :]
        frames = newest.diagonal(dim1=1, dim2=2).clamp(max=self.n_codes - 1)
        is_early = step < self.n_books - 1
        return torch.where(is_early.unsqueeze(1), NO_CODE, frames)
