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
        end_id: behind its last code.
        marks_end: a book has end_id for one step, then begin_id; otherwise it keeps end_id, and
            has it from the second step on.
    """

    n_books: int
    n_codes: int
    begin_id: int
    end_id: int
    marks_end: bool = False

    def steps(self, codes: Tensor) -> Tensor:
        """[n + n_books + 1, n_books] of frames [n, n_books], as a stream of them is written: with a
        frame of begin_id before them and one of end_id behind them."""
        n = len(codes)
        marks = codes.new_tensor([[self.begin_id], [self.end_id]]).expand(-1, self.n_books)
        frames = torch.cat((marks[:1], codes, marks[1:]))
        book = torch.arange(self.n_books, device=codes.device)
        at = torch.arange(n + self.n_books + 1, device=codes.device).unsqueeze(1) - book
        return frames[at.clamp(0, n + 1), book]

    def n_ending(self, history: Tensor) -> Tensor:
        """See forced(); the end begins with an end_id in any book.

        history: [n, >= n_books, n_books] int64, the newest steps, the last one behind; NO_CODE
            before the first.
        """
        newest = history[:, -self.n_books :]
        return (newest == self.end_id).any(dim=2).sum(dim=1)

    def forced(self, step: Tensor, n_ending: Tensor) -> Tensor:
        """[n, n_books] int64, the marks that a step has to have; NO_CODE: any code is possible.

        Args:
            step: [n] int64, number of the step.
            n_ending: [n] int64, steps since the end began, with the one that began it.
        """
        book = torch.arange(self.n_books, device=step.device)
        ending = n_ending.unsqueeze(1)
        marks = torch.where(book > step.unsqueeze(1), self.begin_id, NO_CODE)
        if not self.marks_end:
            return torch.where(book < ending, self.end_id, marks)
        marks = torch.where(book < ending, self.begin_id, marks)
        return torch.where((book == ending) & (ending > 0), self.end_id, marks)

    def ends(self, codes: Tensor) -> Tensor:
        """[n] bool, whether steps [n, n_books] are the last ones."""
        books = codes[:, -1:] if self.marks_end else codes
        return (books == self.end_id).all(dim=1)

    def completed(self, step: Tensor, history: Tensor, codes: Tensor) -> Tensor:
        """[n, n_books] int64, the frames that are complete with a step; NO_CODE: none is yet.

        A mark that a model has written in the place of a code becomes the nearest code.

        Args:
            step, history: see forced() and n_ending().
            codes: [n, n_books] int64, of the step.
        """
        newest = torch.cat((history, codes.unsqueeze(1)), dim=1)[:, -self.n_books :]
        frames = newest.diagonal(dim1=1, dim2=2).clamp(max=self.n_codes - 1)
        is_early = step < self.n_books - 1
        return torch.where(is_early.unsqueeze(1), NO_CODE, frames)
